// Streams, events and graphs. A stream does its work at once, in order; while it is captured, the work is written down.
#include <sys/mman.h>

#include <chrono>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "cuda_runtime.h"
#include "hooks.h"
#include "memory.h"
#include "symbols.h"

using cuda_emulation::Launch;

namespace {

// A piece of work: `kind` and `function` are what a graph's topology is compared by.
struct Work {
  enum Kind { kernel, copy, set, event } kind;
  const void* function = nullptr;
  std::function<cudaError_t()> run;
};

std::recursive_mutex lock_;
std::string failure;
thread_local std::string error_text;
cudaError_t last_error = cudaSuccess;
std::set<cudaStream_t> streams;
std::set<cudaEvent_t> events;
std::map<const char*, size_t> pinned;
std::map<const void*, int> opted_in;  // dynamic shared memory

cudaError_t returned(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}
cudaError_t refused(cudaError_t error, std::string why) {
  failure = std::move(why);
  return returned(error);
}

}  // namespace

struct CUstream_st {
  const cuda_emulation::StreamHooks* hooks;    // first
  std::shared_ptr<std::vector<Work>> capture;  // shared with streams that joined through an event
  bool origin = false, invalidated = false;
};
struct CUevent_st {
  std::chrono::steady_clock::time_point at;
  bool recorded = false, timed = true;
  std::shared_ptr<std::vector<Work>> capture;
};
struct CUgraph_st {
  std::vector<Work> works;
};
struct CUgraphExec_st {
  std::vector<Work> works;
};

namespace {

bool known(cudaStream_t stream) { return !stream || streams.count(stream); }

// What waits for the device, or allocates, while a stream is captured: the capture is lost, as on the device.
bool capture_spoiled(const char* what) {
  bool any = false;
  for (cudaStream_t s : streams)
    if (s->capture) any = s->invalidated = true;
  if (any) failure = std::string(what) + " while a stream is captured";
  return any;
}

cudaError_t submit(cudaStream_t stream, Work work) {
  if (!known(stream)) return refused(cudaErrorInvalidResourceHandle, "not a stream");
  if (!stream && capture_spoiled("work on the default stream")) return returned(cudaErrorStreamCaptureUnsupported);
  if (stream && stream->capture) {
    if (stream->invalidated) return returned(cudaErrorStreamCaptureInvalidated);
    stream->capture->push_back(std::move(work));
    return cudaSuccess;
  }
  return returned(work.run());
}

int submit_for_library(void* stream, std::function<void()> work) {
  std::lock_guard guard(lock_);
  return submit(static_cast<cudaStream_t>(stream), {Work::kernel, nullptr, [work] {
                                                      work();
                                                      return cudaSuccess;
                                                    }});
}

bool on_host(const void* p, size_t bytes) {
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
  std::lock_guard guard(lock_);
  if (const char* what = wrong_launch(config, function))
    return refused(cudaErrorInvalidConfiguration, symbol_name(function) + ": " + what);
  for (int i = 0; i < count; ++i)
    if (const void* p = host_pointer_in(arguments[i].bytes, arguments[i].size))
      if (!on_host(p, 1)) {
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
  return submit(config.stream, {Work::kernel, function, [launch] {
                                  std::string error = run_grid(*launch);
                                  if (error.empty()) return cudaSuccess;
                                  failure = std::move(error);
                                  return cudaErrorLaunchFailure;
                                }});
}

cudaError_t set_function_attribute(const void* function, cudaFuncAttribute attribute, int value) {
  std::lock_guard guard(lock_);
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
    case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
    case cudaErrorGraphExecUpdateFailure: return "cudaErrorGraphExecUpdateFailure";
  }
  return "unrecognized error code";
}
const char* cudaGetErrorString(cudaError_t error) {
  std::lock_guard guard(lock_);
  error_text = cudaGetErrorName(error);
  if (error == cudaErrorMemoryAllocation)
    error_text = "out of memory";
  else if (error != cudaSuccess && error != cudaErrorNotReady && !failure.empty())
    error_text += ": " + failure;
  return error_text.c_str();
}
cudaError_t cudaGetLastError() {
  std::lock_guard guard(lock_);
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
  p->major = 8;
  p->minor = 6;
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
  std::lock_guard guard(lock_);
  return capture_spoiled("cudaDeviceSynchronize") ? returned(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

// ---- memory ---------------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** p, size_t bytes) {
  std::lock_guard guard(lock_);
  *p = nullptr;
  if (capture_spoiled("cudaMalloc")) return returned(cudaErrorStreamCaptureUnsupported);
  if (!bytes) return cudaSuccess;
  *p = cuda_emulation::device_allocate(bytes);
  return *p ? cudaSuccess : returned(cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void* p) {
  std::lock_guard guard(lock_);
  if (capture_spoiled("cudaFree")) return returned(cudaErrorStreamCaptureUnsupported);
  return !p || cuda_emulation::device_free(p) ? cudaSuccess : refused(cudaErrorInvalidValue, "not device memory");
}
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
  std::lock_guard guard(lock_);
  *p = nullptr;
  if (capture_spoiled("cudaHostAlloc")) return returned(cudaErrorStreamCaptureUnsupported);
  if (!bytes) return cudaSuccess;
  *p = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (!*p) return returned(cudaErrorMemoryAllocation);
  memset(*p, cuda_emulation::kGarbage, bytes);
  pinned[static_cast<char*>(*p)] = bytes;
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** p, size_t bytes) { return cudaHostAlloc(p, bytes, cudaHostAllocDefault); }
cudaError_t cudaFreeHost(void* p) {
  std::lock_guard guard(lock_);
  if (!p) return cudaSuccess;
  if (!pinned.erase(static_cast<char*>(p))) return refused(cudaErrorInvalidValue, "not from cudaHostAlloc");
  free(p);
  return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  std::lock_guard guard(lock_);
  if (!width || !height) return cudaSuccess;
  if (width > to_pitch || width > from_pitch) return refused(cudaErrorInvalidValue, "copy: rows wider than the pitch");
  const size_t to_bytes = to_pitch * (height - 1) + width, from_bytes = from_pitch * (height - 1) + width;
  const char* what = wrong_side(to, from, std::min(to_bytes, from_bytes), kind);
  if (!what && cuda_emulation::in_device_memory(to, 1) && !cuda_emulation::in_device_memory(to, to_bytes))
    what = "copy: past the end of the destination";
  if (!what && cuda_emulation::in_device_memory(from, 1) && !cuda_emulation::in_device_memory(from, from_bytes))
    what = "copy: past the end of the source";
  if (what) return refused(cudaErrorInvalidValue, what);
  if (stream && stream->capture && kind != cudaMemcpyDeviceToDevice)
    if (!on_host(kind == cudaMemcpyHostToDevice ? from : to, 1)) {
      stream->invalidated = true;
      return refused(cudaErrorStreamCaptureUnsupported,
                     "copy: memory of the host that is not from cudaHostAlloc, in a "
                     "captured stream");
    }
  return submit(stream, {Work::copy, nullptr, [=] {
                           for (size_t row = 0; row < height; ++row)
                             memmove(static_cast<char*>(to) + row * to_pitch,
                                     static_cast<const char*>(from) + row * from_pitch, width);
                           return cudaSuccess;
                         }});
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return cudaMemcpy2DAsync(to, bytes, from, bytes, bytes, 1, kind, stream);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  std::lock_guard guard(lock_);
  if (capture_spoiled("cudaMemcpy")) return returned(cudaErrorStreamCaptureUnsupported);
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
  std::lock_guard guard(lock_);
  if (!bytes) return cudaSuccess;
  if (!cuda_emulation::in_device_memory(p, bytes))
    return refused(cudaErrorInvalidValue, "set: not (all) device memory");
  return submit(stream, {Work::set, nullptr, [=] {
                           memset(p, value, bytes);
                           return cudaSuccess;
                         }});
}
cudaError_t cudaMemset(void* p, int value, size_t bytes) { return cudaMemsetAsync(p, value, bytes, nullptr); }

// ---- streams and events ---------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  std::lock_guard guard(lock_);
  static constexpr cuda_emulation::StreamHooks hooks{submit_for_library, cuda_emulation::in_device_memory};
  streams.insert(*stream = new CUstream_st{&hooks, nullptr, false, false});
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, 0); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  std::lock_guard guard(lock_);
  if (!stream || !streams.erase(stream)) return refused(cudaErrorInvalidResourceHandle, "not a stream");
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  std::lock_guard guard(lock_);
  if (!known(stream)) return refused(cudaErrorInvalidResourceHandle, "not a stream");
  if (stream ? stream->capture && capture_spoiled("cudaStreamSynchronize") : capture_spoiled("cudaStreamSynchronize"))
    return returned(cudaErrorStreamCaptureUnsupported);
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaStreamSynchronize(stream); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  std::lock_guard guard(lock_);
  if (!known(stream) || !events.count(event)) return refused(cudaErrorInvalidResourceHandle, "not a stream or event");
  if (event->capture && stream && !stream->capture) stream->capture = event->capture;  // the stream joins the capture
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  std::lock_guard guard(lock_);
  events.insert(*event = new CUevent_st);
  (*event)->timed = !(flags & cudaEventDisableTiming);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  std::lock_guard guard(lock_);
  if (!events.erase(event)) return refused(cudaErrorInvalidResourceHandle, "not an event");
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  std::lock_guard guard(lock_);
  if (!events.count(event)) return refused(cudaErrorInvalidResourceHandle, "not an event");
  event->capture = stream ? stream->capture : nullptr;
  if (event->capture) return cudaSuccess;  // an edge of the graph, no node
  return submit(stream, {Work::event, nullptr, [event] {
                           event->at = std::chrono::steady_clock::now();
                           event->recorded = true;
                           return cudaSuccess;
                         }});
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  std::lock_guard guard(lock_);
  if (!events.count(event)) return refused(cudaErrorInvalidResourceHandle, "not an event");
  if (event->capture && capture_spoiled("cudaEventSynchronize")) return returned(cudaErrorStreamCaptureUnsupported);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaEventSynchronize(event); }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  std::lock_guard guard(lock_);
  if (!events.count(begin) || !events.count(end) || !begin->recorded || !end->recorded || !begin->timed || !end->timed)
    return refused(cudaErrorInvalidResourceHandle, "not two recorded events with times");
  *ms = std::chrono::duration<float, std::milli>(end->at - begin->at).count();
  return cudaSuccess;
}

// ---- graphs ---------------------------------------------------------------------------------------------------------

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  std::lock_guard guard(lock_);
  if (!stream || !known(stream) || stream->capture)
    return refused(cudaErrorStreamCaptureUnsupported, "not a stream that can be captured");
  stream->capture = std::make_shared<std::vector<Work>>();
  stream->origin = true;
  stream->invalidated = false;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  std::lock_guard guard(lock_);
  *graph = nullptr;
  if (!stream || !known(stream) || !stream->capture || !stream->origin)
    return refused(cudaErrorInvalidValue, "the stream is not captured");
  const auto capture = stream->capture;
  bool invalidated = false;
  for (cudaStream_t s : streams)
    if (s->capture == capture) {
      invalidated |= s->invalidated;
      s->capture = nullptr;
      s->origin = s->invalidated = false;
    }
  for (cudaEvent_t e : events)
    if (e->capture == capture) e->capture = nullptr;
  if (invalidated) return returned(cudaErrorStreamCaptureInvalidated);
  *graph = new CUgraph_st{*capture};
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  std::lock_guard guard(lock_);
  *status = !stream || !stream->capture ? cudaStreamCaptureStatusNone
            : stream->invalidated       ? cudaStreamCaptureStatusInvalidated
                                        : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = new CUgraphExec_st{graph->works};
  return cudaSuccess;
}
cudaError_t cudaGraphExecUpdate(cudaGraphExec_t exec, cudaGraph_t graph, cudaGraphExecUpdateResultInfo* info) {
  std::lock_guard guard(lock_);
  bool same = exec->works.size() == graph->works.size();
  for (size_t i = 0; same && i < exec->works.size(); ++i)
    same = exec->works[i].kind == graph->works[i].kind && exec->works[i].function == graph->works[i].function;
  info->result = same ? cudaGraphExecUpdateSuccess : cudaGraphExecUpdateErrorTopologyChanged;
  if (!same) return refused(cudaErrorGraphExecUpdateFailure, "other nodes than before");
  exec->works = graph->works;
  return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  std::lock_guard guard(lock_);
  if (stream && stream->capture) return refused(cudaErrorStreamCaptureUnsupported, "a graph in a captured stream");
  for (const Work& work : exec->works)
    if (const cudaError_t error = submit(stream, work)) return error;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
