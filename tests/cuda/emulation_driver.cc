// What test_emulation.py asks of the emulated device: fragments, exchanges of a warp, and every kind of mistake.
#include <cstring>
#include <string>

#include "cuda/device.h"
#include "driver.h"

using namespace pe;
using namespace pe::cuda;

namespace {

enum Product { U8S8, S8S8, BF16 };

__global__ void mma_kernel(int kind, const uint32_t* a, const uint32_t* b, uint32_t* d) {
  wait_for_previous();
  uint32_t ra[4], rb[2];
  for (int i = 0; i < 4; ++i) ra[i] = a[4 * threadIdx.x + i];
  for (int i = 0; i < 2; ++i) rb[i] = b[2 * threadIdx.x + i];
  if (kind == BF16) {
    float rd[4];
    for (int i = 0; i < 4; ++i) rd[i] = __uint_as_float(d[4 * threadIdx.x + i]);
    mma_bf16(rd, ra, rb);
    for (int i = 0; i < 4; ++i) d[4 * threadIdx.x + i] = __float_as_uint(rd[i]);
    return;
  }
  int32_t rd[4];
  for (int i = 0; i < 4; ++i) rd[i] = static_cast<int32_t>(d[4 * threadIdx.x + i]);
  if (kind == U8S8)
    mma_u8s8(rd, ra, rb);
  else
    mma_s8s8(rd, ra, rb);
  for (int i = 0; i < 4; ++i) d[4 * threadIdx.x + i] = static_cast<uint32_t>(rd[i]);
}

// A row of `out` for each kind of exchange; bits of x in double words for the last two.
__global__ void warp_kernel(const int* x, int parameter, int width, int* out, uint64_t* wide) {
  wait_for_previous();
  const int lane = lane_id(), value = x[lane];
  int row = 0;
  const auto put = [&](int v) { out[kWarp * row++ + lane] = v; };
  put(__shfl_sync(kAllLanes, value, parameter, width));
  put(__shfl_xor_sync(kAllLanes, value, parameter, width));
  put(__shfl_up_sync(kAllLanes, value, static_cast<unsigned>(parameter), width));
  put(__shfl_down_sync(kAllLanes, value, static_cast<unsigned>(parameter), width));
  put(static_cast<int>(__ballot_sync(kAllLanes, value & 1)));
  put(__any_sync(kAllLanes, value == parameter));
  put(__all_sync(kAllLanes, value > parameter));
  put(__reduce_add_sync(kAllLanes, value));
  put(__reduce_max_sync(kAllLanes, value));
  put(__reduce_min_sync(kAllLanes, value));
  if (lane < 16) put(__shfl_down_sync(0xffffu, value, 1u, 16));  // half a warp
  wide[lane] = __shfl_xor_sync(kAllLanes, static_cast<uint64_t>(value) << 32 | 7u, 1);
}

__global__ void votes_kernel(const int* x, int* out) {
  wait_for_previous();
  const int value = x[threadIdx.x], n = static_cast<int>(blockDim.x), t = static_cast<int>(threadIdx.x);
  out[t] = __syncthreads_count(value & 1);
  out[n + t] = __syncthreads_or(value == 3);
  out[2 * n + t] = __syncthreads_and(value >= 0);
}

// y = x reversed through shared memory, static or dynamic; without the barrier where `wrong`.
template <bool STATIC>
__global__ void reverse_kernel(const float* x, float* y, int wrong) {
  __shared__ float fixed[256];
  float* shared = STATIC ? fixed : reinterpret_cast<float*>(shared_memory());
  wait_for_previous();
  shared[threadIdx.x] = x[threadIdx.x];
  if (!wrong) __syncthreads();
  y[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}

// y = x reversed inside a warp.
__global__ void warp_reverse_kernel(const float* x, float* y, int wrong) {
  float* shared = reinterpret_cast<float*>(shared_memory());
  wait_for_previous();
  shared[threadIdx.x] = x[threadIdx.x];
  if (!wrong) __syncwarp();
  y[threadIdx.x] = shared[threadIdx.x ^ 31u];
}

// y = x by cp.async in four pieces a thread; the last piece is read after at most `left` groups are under way.
template <int LEFT>
__global__ void copy_kernel(const float* x, float* y, int commit) {
  float* mine = reinterpret_cast<float*>(shared_memory()) + 16 * threadIdx.x;
  wait_for_previous();
  for (int i = 0; i < 4; ++i) {
    copy_async16(mine + 4 * i, x + 16 * threadIdx.x + 4 * i);
    if (commit) copy_async_commit();
  }
  copy_async_wait<LEFT>();
  for (int i = 0; i < 16; ++i) y[16 * threadIdx.x + i] = mine[i];
}

enum Mistake {
  NONE,
  BARRIER_IN_A_BRANCH,
  BARRIER_AFTER_AN_EXIT,
  TWO_BARRIERS,
  SHUFFLE_IN_A_BRANCH,
  SHUFFLE_OUTSIDE_THE_MASK,
  MASK_WITHOUT_ITSELF,
  MASK_WITH_THE_ENDED,
  OTHER_MASKS,
  MMA_IN_A_BRANCH,
  PAST_SHARED,
  BEFORE_SHARED,
  PAST_AN_ALLOCATION,
  NULL_POINTER,
  SPIN,
  FULL_STACK,
  NO_WAIT,
  UNALIGNED_COPY,
  COPY_TO_GLOBAL,
  UNALIGNED_LOAD,
  TRAP,
  WRITE_PAST_SHARED,
};

int deep(volatile char* outer, int n) {
  volatile char here[4096];
  here[0] = static_cast<char>(n + outer[0]);
  return n ? deep(here, n - 1) + here[0] : here[0];
}

__global__ void mistaken_kernel(int mistake, float* y, int64_t n) {
  if (mistake != NO_WAIT) wait_for_previous();
  const int t = static_cast<int>(threadIdx.x);
  float* shared = reinterpret_cast<float*>(shared_memory());
  uint32_t a[4] = {}, b[2] = {};
  int32_t d[4] = {};
  switch (mistake) {
    case BARRIER_IN_A_BRANCH:
      if (t != 5) __syncthreads();
      break;
    case BARRIER_AFTER_AN_EXIT:
      if (t == 40) return;
      __syncthreads();
      break;
    case TWO_BARRIERS:
      if (t < 32)
        __syncthreads();
      else
        __syncthreads();
      break;
    case SHUFFLE_IN_A_BRANCH:
      if (t % 32 != 7) y[t] = __shfl_xor_sync(kAllLanes, 1.0f, 1);
      __syncthreads();
      break;
    case SHUFFLE_OUTSIDE_THE_MASK:
      if (t % 32 < 16) y[t] = __shfl_sync(0xffffu, 1.0f, 20);
      break;
    case MASK_WITHOUT_ITSELF: __syncwarp(1u); break;
    case MASK_WITH_THE_ENDED:
      if (t == 33) return;
      __syncwarp();
      break;
    case OTHER_MASKS: __syncwarp(t % 32 == 3 ? 0xfu : kAllLanes); break;
    case MMA_IN_A_BRANCH:
      if (t % 32 < 16)
        mma_s8s8(d, a, b);
      else
        mma_s8s8(d, a, b);
      break;
    case PAST_SHARED: y[t] = shared[64 + t]; break;
    case BEFORE_SHARED: y[t] = *(shared - (100 << 10)); break;
    case PAST_AN_ALLOCATION: y[t + n] = 1; break;
    case NULL_POINTER: *reinterpret_cast<volatile int*>(n - n) = 1; break;
    case SPIN:
      while (atomicAdd(y, 0.0f) >= 0.0f) {
      }
      break;
    case FULL_STACK: y[t] = static_cast<float>(deep(reinterpret_cast<volatile char*>(y), 1 << 20)); break;
    case UNALIGNED_COPY: copy_async16(shared, y + 1); break;
    case COPY_TO_GLOBAL: copy_async16(y, y + 4); break;
    case UNALIGNED_LOAD: y[t] = static_cast<float>(load_once(y + 1).x); break;
    case TRAP:
      if (t == 9) __trap();
      break;
    case WRITE_PAST_SHARED: reinterpret_cast<uint8_t*>(shared)[200] = 1; break;
    default: break;
  }
  y[t] = 2;
}

__global__ void add_one_kernel(float* y) {
  wait_for_previous();
  y[blockIdx.x * blockDim.x + threadIdx.x] += 1;
}

// y = x + 1, x read in front of wait_for_previous() where `early`.
__global__ void plus_one_kernel(const float* x, float* y, int early) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  float value = early ? x[i] : 0.0f;
  wait_for_previous();
  let_next_start();
  if (!early) value = x[i];
  y[i] = value + 1;
}

// The last block to come adds up what the others left.
__global__ void last_block_kernel(float* parts, unsigned* count, float* out) {
  __shared__ int last;
  wait_for_previous();
  if (threadIdx.x == 0) {
    parts[blockIdx.x] = static_cast<float>(blockIdx.x + 1);
    __threadfence();
    last = atomicAdd(count, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last || threadIdx.x) return;
  float sum = 0;
  for (unsigned i = 0; i < gridDim.x; ++i) sum += parts[i];
  *out = sum;
}

}  // namespace

extern "C" {

const char* driver_error() { return last_error(); }

int run_mma(int64_t kind, const uint32_t* a, const uint32_t* b, uint32_t* d) {
  return driven([&](Stream stream) {
    Array<uint32_t> da(a, 128), db(b, 64), dd(d, 128);
    launch(stream, mma_kernel, dim3(1), dim3(32), 0, static_cast<int>(kind), da.data(), db.data(), dd.data());
    dd.read(d);
  });
}

int run_warp(const int* x, int64_t parameter, int64_t width, int* out, uint64_t* wide) {
  return driven([&](Stream stream) {
    Array<int> dx(x, 32), dout(11 * 32);
    Array<uint64_t> dwide(32);
    launch(stream, warp_kernel, dim3(1), dim3(32), 0, dx.data(), static_cast<int>(parameter), static_cast<int>(width),
           dout.data(), dwide.data());
    dout.read(out);
    dwide.read(wide);
  });
}

int run_votes(const int* x, int64_t threads, int* out) {
  return driven([&](Stream stream) {
    Array<int> dx(x, threads), dout(3 * threads);
    launch(stream, votes_kernel, dim3(1), dim3(static_cast<unsigned>(threads)), 0, dx.data(), dout.data());
    dout.read(out);
  });
}

// how: 0 static, 1 dynamic shared memory, 2 inside a warp
int run_reverse(int64_t how, const float* x, float* y, int64_t threads, int64_t wrong) {
  return driven([&](Stream stream) {
    Array<float> dx(x, threads), dy(threads);
    const auto kernel = how == 0 ? reverse_kernel<true> : how == 1 ? reverse_kernel<false> : warp_reverse_kernel;
    launch(stream, kernel, dim3(1), dim3(static_cast<unsigned>(threads)), how ? static_cast<size_t>(4 * threads) : 0,
           dx.data(), dy.data(), static_cast<int>(wrong));
    dy.read(y);
  });
}

int run_copy(const float* x, float* y, int64_t threads, int64_t left, int64_t commit) {
  return driven([&](Stream stream) {
    Array<float> dx(x, 16 * threads), dy(16 * threads);
    launch(stream, left ? copy_kernel<1> : copy_kernel<0>, dim3(1), dim3(static_cast<unsigned>(threads)),
           static_cast<size_t>(64 * threads), dx.data(), dy.data(), static_cast<int>(commit));
    dy.read(y);
  });
}

int run_mistake(int64_t mistake) {
  return driven([&](Stream stream) {
    Array<float> y(64);
    launch(stream, mistaken_kernel, dim3(2), dim3(64), mistake == WRITE_PAST_SHARED ? 200 : 256,
           static_cast<int>(mistake), y.data(), int64_t{64});
  });
}

int run_last_block(int64_t blocks, float* out) {
  return driven([&](Stream stream) {
    Array<float> parts(blocks), sum(1);
    Array<unsigned> count(1);
    launch(stream, last_block_kernel, dim3(static_cast<unsigned>(blocks)), dim3(64), 0, parts.data(), count.data(),
           sum.data());
    sum.read(out);
  });
}

// what: the launch to make
int run_launch(int64_t what) {
  return driven([&](Stream stream) {
    Array<float> y(64);
    float on_host = 0;
    const auto go = [&](dim3 grid, dim3 block, size_t bytes, float* p) {
      launch(stream, add_one_kernel, grid, block, bytes, p);
    };
    switch (what) {
      case 0: go(dim3(0), dim3(32), 0, y.data()); break;
      case 1: go(dim3(1), dim3(1025), 0, y.data()); break;
      case 2: go(dim3(1, 70000), dim3(1), 0, y.data()); break;
      case 3: go(dim3(1), dim3(32), 49 << 10, y.data()); break;
      case 4: go(dim3(1), dim3(1), 0, &on_host); break;
      case 5:
        check(cudaFuncSetAttribute(add_one_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 << 10), "opt in");
        break;
      case 6:
        check(cudaFuncSetAttribute(add_one_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 99 << 10), "opt in");
        go(dim3(1), dim3(32), 99 << 10, y.data());
        check(cudaFuncSetAttribute(add_one_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 0), "opt out");
        break;
      default: break;
    }
  });
}

// out = 0 + 1 + 1 + ... by `times` pairs of kernels that overlap.
int run_overlap(int64_t early, int64_t times, float* out) {
  return driven([&](Stream stream) {
    Array<float> x(64), y(64);
    for (int64_t i = 0; i < times; ++i) {
      launch(stream, plus_one_kernel, dim3(2), dim3(32), 0, x.data(), y.data(), 0);
      launch(stream, plus_one_kernel, dim3(2), dim3(32), 0, y.data(), x.data(), static_cast<int>(early));
    }
    must(cudaStreamSynchronize(stream));
    x.read(out);
  });
}

enum Streams { RIGHT, READ_EARLY, OVERWRITE_EARLY, NO_EVENT };
// From pinned memory into x on one stream, x + 1 and into pinned memory on another.
int run_streams(int64_t mistake, float* out) {
  return driven([&](Stream first) {
    Array<float> x(64), y(64);
    float *from = nullptr, *to = nullptr;
    cudaStream_t second;
    cudaEvent_t ready;
    must(cudaMallocHost(&from, 256));
    must(cudaMallocHost(&to, 256));
    must(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    must(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming));
    for (int i = 0; i < 64; ++i) from[i] = static_cast<float>(i + 1);
    must(cudaMemcpyAsync(x.data(), from, 256, cudaMemcpyHostToDevice, first));
    if (mistake == OVERWRITE_EARLY) from[5] = -1;
    must(cudaEventRecord(ready, first));
    if (mistake != NO_EVENT) must(cudaStreamWaitEvent(second, ready));
    launch(second, plus_one_kernel, dim3(2), dim3(32), 0, x.data(), y.data(), 0);
    must(cudaMemcpyAsync(to, y.data(), 256, cudaMemcpyDeviceToHost, second));
    if (mistake == READ_EARLY) std::memcpy(out, to, 256);
    must(cudaStreamSynchronize(second));
    if (mistake != READ_EARLY) std::memcpy(out, to, 256);
    must(cudaStreamDestroy(second));
    must(cudaEventDestroy(ready));
    must(cudaFreeHost(from));
    must(cudaFreeHost(to));
  });
}

// Captures two launches and a copy to the host, spoils the capture as asked, replays `times` times.
int run_graph(int64_t spoil, int64_t times, float* out) {
  return driven([&](Stream stream) {
    Array<float> y(64), z(64);
    float* pinned = nullptr;
    float pageable[64];
    void* more = nullptr;
    must(cudaMallocHost(&pinned, sizeof pageable));
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "begin");
    {
      Array<float>* arguments_die = spoil == 1 ? new Array<float>(1) : nullptr;
      delete arguments_die;
    }
    float* target = y.data();
    launch(stream, add_one_kernel, dim3(2), dim3(32), 0, target);
    target = z.data();  // the graph has copies of the arguments
    launch(stream, add_one_kernel, dim3(2), dim3(32), 0, y.data());
    cudaError_t error = cudaSuccess;
    if (spoil == 2) error = cudaStreamSynchronize(stream);
    if (spoil == 3) error = cudaMemcpyAsync(pageable, y.data(), sizeof pageable, cudaMemcpyDeviceToHost, stream);
    if (spoil == 4) error = cudaMemcpy(pageable, y.data(), sizeof pageable, cudaMemcpyDeviceToHost);
    if (spoil == 5) error = cudaMalloc(&more, 64);
    const cudaError_t copied = cudaMemcpyAsync(pinned, y.data(), sizeof pageable, cudaMemcpyDeviceToHost, stream);
    const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
    if (error != cudaSuccess) {
      must(cudaFreeHost(pinned));
      if (copied != cudaErrorStreamCaptureInvalidated || ended != cudaErrorStreamCaptureInvalidated || graph)
        fail(PE_INTERNAL, "a spoiled capture went on");
      check(error, "spoiled");
    }
    check(copied, "copy");
    check(ended, "end");
    check(cudaGraphInstantiate(&exec, graph), "instantiate");
    check(cudaGraphDestroy(graph), "destroy");
    y.read(out);  // nothing ran yet
    if (out[0] != 0) fail(PE_INTERNAL, "a launch ran while it was captured");
    for (int64_t i = 0; i < times; ++i) check(cudaGraphLaunch(exec, stream), "launch");
    check(cudaStreamSynchronize(stream), "wait");
    std::memcpy(out, pinned, sizeof pageable);
    check(cudaGraphExecDestroy(exec), "destroy");
    must(cudaFreeHost(pinned));
  });
}

}  // extern "C"
