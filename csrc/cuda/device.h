// What every .cu file begins with: the runtime, PTX, launches, and a few functions of a warp.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/status.h"
#include "cuda/kernels.h"
#include "cuda/ptx.h"

namespace pe::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) fail(PE_RESOURCE, "CUDA: %s: %s", what, cudaGetErrorString(error));
}

// Whether kernels of the current device can begin before those in front have ended.
inline bool device_overlaps() {
  int device = 0, major = 0;
  check(cudaGetDevice(&device), "device");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "device");
  return major >= 9;
}

// kernel(args...) on a stream. From 9.0 the kernel may begin before the one in front has ended, so its first access to
// anything but weights stands behind wait_for_previous(). launch_after begins when all in front has ended.
template <class... Parameters, class... Arguments>
void launch_with(bool overlaps, Stream stream, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                 size_t shared_bytes, Arguments&&... arguments) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = overlaps ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), "launch");
}
template <class Kernel, class... Arguments>
void launch(Stream stream, Kernel* kernel, dim3 grid, dim3 block, size_t shared_bytes, Arguments&&... arguments) {
  launch_with(device_overlaps(), stream, kernel, grid, block, shared_bytes, static_cast<Arguments&&>(arguments)...);
}
template <class Kernel, class... Arguments>
void launch_after(Stream stream, Kernel* kernel, dim3 grid, dim3 block, size_t shared_bytes, Arguments&&... arguments) {
  launch_with(false, stream, kernel, grid, block, shared_bytes, static_cast<Arguments&&>(arguments)...);
}

#ifdef __CUDACC__
// The dynamic shared memory of the block, aligned to 128 bytes.
__device__ __forceinline__ uint8_t* shared_memory() {
  extern __shared__ __align__(128) uint8_t pe_shared[];
  return pe_shared;
}
#endif

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ __forceinline__ int warp_id() { return static_cast<int>(threadIdx.x) / kWarp; }

// Over a warp, in a fixed tree; every lane gets the result.
__device__ __forceinline__ float warp_sum(float x) {
  for (int step = kWarp / 2; step; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
  for (int step = kWarp / 2; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

// Over a block of whole warps, in a fixed tree; every thread gets the result.
__device__ __forceinline__ float block_sum(float x) {
  __shared__ float parts[kWarp];
  x = warp_sum(x);
  if (lane_id() == 0) parts[warp_id()] = x;
  __syncthreads();
  x = warp_sum(lane_id() * kWarp < static_cast<int>(blockDim.x) ? parts[lane_id()] : 0.0f);
  __syncthreads();
  return x;
}

// Bits of a bfloat16, and the nearest to a float32 (ties to even; NaN stays NaN).
__device__ __forceinline__ float from_bf16(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
__device__ __forceinline__ uint16_t to_bf16(float x) {
  const uint32_t bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace pe::cuda
