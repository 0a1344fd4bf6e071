// What libpyengine_cuda.so is built with: CUDA devices, and the CPU.
#include <charconv>
#include <cstring>

#include "core/status.h"
#include "cuda/backend.h"
#include "runtime/cpu_backend.h"

namespace pe {

namespace {

using cuda::check_cuda;

int32_t parsed_device(const char* name) {
  if (std::strcmp(name, "cuda") == 0) return 0;
  int32_t index = -1;
  if (std::strncmp(name, "cuda:", 5) == 0) {
    const char* end = name + std::strlen(name);
    const auto result = std::from_chars(name + 5, end, index);
    if (result.ec != std::errc() || result.ptr != end) index = -1;
  }
  if (index < 0) fail(PE_REQUEST, "device %s; expected cpu, cuda or cuda:N", name);
  return index;
}

void check_index(int32_t device) {
  std::string why_none;
  const int32_t count = device_count(why_none);
  if (count == 0) fail(PE_RESOURCE, "no CUDA device: %s", why_none.c_str());
  if (device < 0 || device >= count) fail(PE_RESOURCE, "no device cuda:%d; there are %d", device, count);
}

}  // namespace

std::unique_ptr<pe_backend> create_backend(const pe_backend_config& config) {
  const char* device = config.device ? config.device : "cuda";
  if (std::strcmp(device, "cpu") == 0) return std::make_unique<CpuBackend>(config.threads, config.isa);
  const int32_t index = parsed_device(device);
  check_index(index);
  return std::make_unique<cuda::CudaBackend>(config.threads, config.isa, index);
}

int32_t device_count(std::string& why_none) {
  int count = 0, driver = 0, runtime = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return count;
  cudaGetLastError();
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  const auto version = [](int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); };
  if (driver == 0)
    why_none = "no NVIDIA driver (libcuda.so.1)";
  else if (error == cudaErrorInsufficientDriver)
    why_none = "the driver is for CUDA " + version(driver) + "; this library needs " + version(runtime);
  else
    why_none = error == cudaSuccess ? "the driver has no device" : cudaGetErrorString(error);
  return 0;
}

const char* device_name(int32_t device) {
  static thread_local char name[256];
  std::string why_none;
  if (device < 0 || device >= device_count(why_none)) return nullptr;
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, device), "asking what the device is");
  std::memcpy(name, properties.name, sizeof name);
  return name;
}

void device_bytes(int32_t device, uint64_t* free, uint64_t* total) {
  check_index(device);
  size_t free_bytes = 0, total_bytes = 0;
  check_cuda(cudaSetDevice(device), "selecting the device");
  check_cuda(cudaMemGetInfo(&free_bytes, &total_bytes), "asking for free memory");
  *free = free_bytes;
  *total = total_bytes;
}

}  // namespace pe
