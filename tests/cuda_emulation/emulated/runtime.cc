// The runtime's functions, but for streams and graphs (streams.cc): launches, errors, the device, memory.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>

#include "cuda_runtime.h"
#include "memory.h"
#include "streams.h"
#include "symbols.h"

using namespace cuda_emulation;

namespace {

thread_local std::string error_text;
cudaError_t last_error = cudaSuccess;
std::map<const char*, size_t> pinned;
std::map<const void*, int> opted_in;  // dynamic shared memory

bool is_pinned(const void* p, size_t bytes) {
  const auto after = pinned.upper_bound(static_cast<const char*>(p));
  return after != pinned.begin() &&
         static_cast<const char*>(p) + bytes <= std::prev(after)->first + std::prev(after)->second;
}

// Whether the sides are what `kind` says.
const char* wrong_side(const void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const bool to_device = cuda_emulation::in_device_memory(to, bytes);
  const bool from_device = cuda_emulation::in_device_memory(from, bytes);
  if (kind == cudaMemcpyDefault) return nullptr;
  if (to_device != (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice))
    return to_device ? "copy: the destination is device memory" : "copy: the destination is not (all) device memory";
  if (from_device != (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice))
    return from_device ? "copy: the source is device memory" : "copy: the source is not (all) device memory";
  return nullptr;
}

}  // namespace

namespace cuda_emulation {

std::recursive_mutex api_lock;

std::string& failure() {
  static std::string text;
  return text;
}
cudaError_t returned(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}
cudaError_t refused(cudaError_t error, std::string why) {
  failure() = std::move(why);
  return returned(error);
}

namespace {
const char* wrong_launch(const cudaLaunchConfig_t& c, const void* function) {
  const dim3 g = c.gridDim, b = c.blockDim;
  if (!g.x || !g.y || !g.z || g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535) return "a grid that no device takes";
  if (!b.x || !b.y || !b.z || b.z > 64 || uint64_t{b.x} * b.y * b.z > kMaxThreads)
    return "a block that no device takes";
  const auto found = opted_in.find(function);
  const size_t limit = std::max(kDefaultSharedBytes, found == opted_in.end() ? 0 : static_cast<size_t>(found->second));
  if (c.dynamicSmemBytes > limit) return "more shared memory than the kernel was given by cudaFuncSetAttribute";
  return nullptr;
}
}  // namespace

cudaError_t launch_kernel(const cudaLaunchConfig_t& config, const void* function, std::function<void()> body,
                          const Argument* arguments, int count) {
  std::lock_guard guard(api_lock);
  if (const char* what = wrong_launch(config, function))
    return refused(cudaErrorInvalidConfiguration, symbol_name(function) + ": " + what);
  for (int i = 0; i < count; ++i)
    if (const void* p = host_pointer_in(arguments[i].bytes, arguments[i].size))
      if (!is_pinned(p, 1)) {
        char text[96];
        snprintf(text, sizeof text, ": argument %d holds %p, which is memory of the host", i + 1, p);
        return refused(cudaErrorLaunchFailure, symbol_name(function) + text);
      }
  auto launch = std::make_shared<Launch>();
  launch->function = function;
  launch->body = std::move(body);
  launch->grid = config.gridDim;
  launch->block = config.blockDim;
  launch->shared_bytes = config.dynamicSmemBytes;
  for (unsigned i = 0; i < config.numAttrs; ++i)
    if (config.attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization)
      launch->overlaps_previous = config.attrs[i].val.programmaticStreamSerializationAllowed != 0;
  return submit(config.stream, {Work::kernel, function,
                                [launch](const Launch* next) {
                                  std::string what = run_grid(*launch, next);
                                  if (what.empty()) return cudaSuccess;
                                  failure() = std::move(what);
                                  return cudaErrorLaunchFailure;
                                },
                                launch});
}

cudaError_t set_function_attribute(const void* function, cudaFuncAttribute attribute, int value) {
  std::lock_guard guard(api_lock);
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
  if (value < 0 || static_cast<size_t>(value) > kMaxSharedBytes)
    return refused(cudaErrorInvalidValue, symbol_name(function) + ": asks for " + std::to_string(value) +
                                              " bytes of shared memory of " + std::to_string(kMaxSharedBytes));
  opted_in[function] = value;
  return cudaSuccess;
}

cudaError_t occupancy(int* blocks, const void*, int threads, size_t shared_bytes) {
  *blocks = std::min<int>(1536 / std::max(threads, 1), static_cast<int>((100 << 10) / (shared_bytes + 1024)));
  return cudaSuccess;
}

}  // namespace cuda_emulation

// ---- errors and devices ---------------------------------------------------------------------------------------------

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorInsufficientDriver: return "cudaErrorInsufficientDriver";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureIsolation: return "cudaErrorStreamCaptureIsolation";
    case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
    case cudaErrorGraphExecUpdateFailure: return "cudaErrorGraphExecUpdateFailure";
  }
  return "unrecognized error code";
}
const char* cudaGetErrorString(cudaError_t error) {
  std::lock_guard guard(api_lock);
  error_text = cudaGetErrorName(error);
  if (error == cudaErrorMemoryAllocation)
    error_text = "out of memory";
  else if (error != cudaSuccess && error != cudaErrorNotReady && !failure().empty())
    error_text += ": " + failure();
  return error_text.c_str();
}
cudaError_t cudaGetLastError() {
  std::lock_guard guard(api_lock);
  return std::exchange(last_error, cudaSuccess);
}
cudaError_t cudaPeekAtLastError() { return last_error; }

cudaError_t cudaGetDeviceCount(int* count) {
  const char* text = getenv("PYENGINE_CUDA_EMULATION_DEVICES");
  *count = text ? atoi(text) : 1;
  return *count ? cudaSuccess : returned(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : returned(cudaErrorInvalidDevice); }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (device != 0) return returned(cudaErrorInvalidDevice);
  *p = {};
  snprintf(p->name, sizeof p->name, "CUDA emulation");
  p->totalGlobalMem = cuda_emulation::device_bytes_total();
  p->sharedMemPerBlock = cuda_emulation::kDefaultSharedBytes;
  p->sharedMemPerBlockOptin = cuda_emulation::kMaxSharedBytes;
  p->sharedMemPerMultiprocessor = 100 << 10;
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 1536;
  p->major = 9;  // launches overlap; shared memory and threads are those of 8.6, which has the least
  p->minor = 0;
  p->multiProcessorCount = 3;
  p->l2CacheSize = 1 << 20;
  p->memoryBusWidth = 64;
  for (int i = 0; i < 3; ++i) {
    p->maxThreadsDim[i] = i < 2 ? 1024 : 64;
    p->maxGridSize[i] = i < 1 ? 0x7fffffff : 65535;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp p;
  if (const cudaError_t error = cudaGetDeviceProperties(&p, device)) return error;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = static_cast<int>(p.sharedMemPerBlock); break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = static_cast<int>(p.sharedMemPerMultiprocessor); break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(p.sharedMemPerBlockOptin); break;
    default: return returned(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  *total_bytes = cuda_emulation::device_bytes_total();
  *free_bytes = *total_bytes - cuda_emulation::device_bytes_used();
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  std::lock_guard guard(api_lock);
  if (capture_spoiled("cudaDeviceSynchronize")) return returned(cudaErrorStreamCaptureUnsupported);
  return finish(nullptr);
}

// ---- memory ---------------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** p, size_t bytes) {
  std::lock_guard guard(api_lock);
  *p = nullptr;
  if (capture_spoiled("cudaMalloc")) return returned(cudaErrorStreamCaptureUnsupported);
  if (!bytes) return cudaSuccess;
  *p = device_allocate(bytes);
  return *p ? cudaSuccess : returned(cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void* p) {
  std::lock_guard guard(api_lock);
  if (capture_spoiled("cudaFree")) return returned(cudaErrorStreamCaptureUnsupported);
  settle();
  return !p || device_free(p) ? cudaSuccess : refused(cudaErrorInvalidValue, "not device memory");
}
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
  std::lock_guard guard(api_lock);
  *p = nullptr;
  if (capture_spoiled("cudaHostAlloc")) return returned(cudaErrorStreamCaptureUnsupported);
  if (!bytes) return cudaSuccess;
  *p = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (!*p) return returned(cudaErrorMemoryAllocation);
  memset(*p, kGarbage, bytes);
  pinned[static_cast<char*>(*p)] = bytes;
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** p, size_t bytes) { return cudaHostAlloc(p, bytes, cudaHostAllocDefault); }
cudaError_t cudaFreeHost(void* p) {
  std::lock_guard guard(api_lock);
  if (!p) return cudaSuccess;
  settle();
  if (!pinned.erase(static_cast<char*>(p))) return refused(cudaErrorInvalidValue, "not from cudaHostAlloc");
  free(p);
  return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  std::lock_guard guard(api_lock);
  if (!width || !height) return cudaSuccess;
  if (width > to_pitch || width > from_pitch) return refused(cudaErrorInvalidValue, "copy: rows wider than the pitch");
  const size_t to_bytes = to_pitch * (height - 1) + width, from_bytes = from_pitch * (height - 1) + width;
  const char* what = wrong_side(to, from, std::min(to_bytes, from_bytes), kind);
  if (!what && in_device_memory(to, 1) && !in_device_memory(to, to_bytes))
    what = "copy: past the end of the destination";
  if (!what && in_device_memory(from, 1) && !in_device_memory(from, from_bytes))
    what = "copy: past the end of the source";
  if (what) return refused(cudaErrorInvalidValue, what);
  const bool pageable = (kind == cudaMemcpyHostToDevice && !is_pinned(from, from_bytes)) ||
                        (kind == cudaMemcpyDeviceToHost && !is_pinned(to, to_bytes));
  if (pageable && is_captured(stream)) {
    spoil(stream);
    return refused(cudaErrorStreamCaptureUnsupported,
                   "copy: memory of the host that is not from cudaHostAlloc, in a "
                   "captured stream");
  }
  std::shared_ptr<std::vector<char>> staged;  // memory that is not pinned is read before the call returns
  if (pageable && kind == cudaMemcpyHostToDevice)
    staged = std::make_shared<std::vector<char>>(static_cast<const char*>(from),
                                                 static_cast<const char*>(from) + from_bytes);
  const cudaError_t error =
      submit(stream, {Work::copy, nullptr,
                      [=](const Launch*) {
                        const char* source = staged ? staged->data() : static_cast<const char*>(from);
                        for (size_t row = 0; row < height; ++row)
                          memmove(static_cast<char*>(to) + row * to_pitch, source + row * from_pitch, width);
                        return cudaSuccess;
                      },
                      nullptr});
  return error == cudaSuccess && pageable && kind == cudaMemcpyDeviceToHost ? finish(stream) : error;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return cudaMemcpy2DAsync(to, bytes, from, bytes, bytes, 1, kind, stream);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  std::lock_guard guard(api_lock);
  if (capture_spoiled("cudaMemcpy")) return returned(cudaErrorStreamCaptureUnsupported);
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
  std::lock_guard guard(api_lock);
  if (!bytes) return cudaSuccess;
  if (!in_device_memory(p, bytes)) return refused(cudaErrorInvalidValue, "set: not (all) device memory");
  return submit(stream, {Work::set, nullptr,
                         [=](const Launch*) {
                           memset(p, value, bytes);
                           return cudaSuccess;
                         },
                         nullptr});
}
cudaError_t cudaMemset(void* p, int value, size_t bytes) { return cudaMemsetAsync(p, value, bytes, nullptr); }
