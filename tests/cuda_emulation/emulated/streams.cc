#include "streams.h"

#include <chrono>
#include <cstdlib>
#include <deque>
#include <set>

#include "hooks.h"
#include "memory.h"

using namespace cuda_emulation;

namespace {
using Capture = std::shared_ptr<std::vector<Work>>;
std::set<cudaStream_t> streams;
std::set<cudaEvent_t> events;
cudaError_t broken = cudaSuccess;  // what a kernel did, until a call that waits returns it
}  // namespace

struct CUstream_st {
  const StreamHooks* hooks;  // first
  bool blocking = true;      // with respect to the default stream
  std::deque<Work> queue;
  Capture capture;  // shared with streams that joined through an event
  bool origin = false, invalidated = false;
};
struct CUevent_st {
  std::chrono::steady_clock::time_point at;
  cudaStream_t stream = nullptr;
  uint64_t recorded = 0, done = 0;  // calls of cudaEventRecord, and those that the stream has come to
  bool timed = true;
  Capture capture;
};
struct CUgraph_st {
  std::vector<Work> works;
};
struct CUgraphExec_st {
  std::vector<Work> works;
};

namespace {

bool known(cudaStream_t stream) { return !stream || streams.count(stream); }

// The first work of the queue.
void step(cudaStream_t stream) {
  const Work work = std::move(stream->queue.front());
  stream->queue.pop_front();
  const Launch* next = work.launch && !stream->queue.empty() ? stream->queue.front().launch.get() : nullptr;
  const cudaError_t error = work.run(next);
  if (error == cudaSuccess) return;
  broken = error;
  for (cudaStream_t s : streams) s->queue.clear();
}

void run_all(cudaStream_t stream) {
  while (!stream->queue.empty()) step(stream);
}

void reach(cudaEvent_t event, uint64_t record) {
  while (events.count(event) && event->done < record && event->stream && !event->stream->queue.empty())
    step(event->stream);
}

bool at_once() {
  static const char* const text = getenv("PYENGINE_CUDA_EMULATION_AT_ONCE");
  return text && *text == '1';
}

int submit_for_library(void* stream, std::function<void()> work) {
  std::lock_guard guard(api_lock);
  return submit(static_cast<cudaStream_t>(stream), {Work::kernel, nullptr,
                                                    [work](const Launch*) {
                                                      work();
                                                      return cudaSuccess;
                                                    },
                                                    nullptr});
}

}  // namespace

namespace cuda_emulation {

bool capture_spoiled(const char* what) {
  bool any = false;
  for (cudaStream_t s : streams)
    if (s->capture) any = s->invalidated = true;
  if (any) failure() = std::string(what) + " while a stream is captured";
  return any;
}
bool is_captured(cudaStream_t stream) { return stream && stream->capture; }
void spoil(cudaStream_t stream) { stream->invalidated = true; }

void settle() {
  for (cudaStream_t s : streams) run_all(s);
}

cudaError_t finish(cudaStream_t stream) {
  if (stream)
    run_all(stream);
  else
    settle();
  return returned(std::exchange(broken, cudaSuccess));
}

cudaError_t submit(cudaStream_t stream, Work work) {
  if (!known(stream)) return refused(cudaErrorInvalidResourceHandle, "not a stream");
  if (!stream) {  // behind all that blocking streams have to do, and at once
    if (capture_spoiled("work on the default stream")) return returned(cudaErrorStreamCaptureUnsupported);
    for (cudaStream_t s : streams)
      if (s->blocking) run_all(s);
    if (broken == cudaSuccess) broken = work.run(nullptr);
    return returned(std::exchange(broken, cudaSuccess));
  }
  if (stream->invalidated) return returned(cudaErrorStreamCaptureInvalidated);
  if (broken != cudaSuccess) return returned(broken);
  if (stream->capture) {
    stream->capture->push_back(std::move(work));
    return cudaSuccess;
  }
  stream->queue.push_back(std::move(work));
  return at_once() ? finish(stream) : cudaSuccess;
}

}  // namespace cuda_emulation

// ---- streams --------------------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  std::lock_guard guard(api_lock);
  static constexpr StreamHooks hooks{submit_for_library, in_device_memory};
  streams.insert(*stream = new CUstream_st{&hooks, !(flags & cudaStreamNonBlocking), {}, nullptr, false, false});
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, 0); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  std::lock_guard guard(api_lock);
  if (!stream || !known(stream)) return refused(cudaErrorInvalidResourceHandle, "not a stream");
  run_all(stream);
  for (cudaEvent_t e : events)
    if (e->stream == stream) e->stream = nullptr;
  streams.erase(stream);
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  std::lock_guard guard(api_lock);
  if (!known(stream)) return refused(cudaErrorInvalidResourceHandle, "not a stream");
  if ((!stream || stream->capture) && capture_spoiled("cudaStreamSynchronize"))
    return returned(cudaErrorStreamCaptureUnsupported);
  return finish(stream);
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {  // the device goes on a little
  std::lock_guard guard(api_lock);
  if (!stream || !known(stream) || stream->capture) return cudaStreamSynchronize(stream);
  if (!stream->queue.empty()) step(stream);
  return stream->queue.empty() ? finish(stream) : cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  std::lock_guard guard(api_lock);
  if (!known(stream) || !events.count(event)) return refused(cudaErrorInvalidResourceHandle, "not a stream or event");
  if (event->capture && stream) {
    if (!stream->capture) stream->capture = event->capture;  // the stream joins the capture
    if (stream->capture == event->capture) return cudaSuccess;
  }
  if (event->capture || is_captured(stream))
    return refused(cudaErrorStreamCaptureIsolation, "a stream waits for an event of another capture, or of none");
  const uint64_t wanted = event->recorded;
  return submit(stream, {Work::wait, nullptr,
                         [event, wanted](const Launch*) {
                           reach(event, wanted);
                           return broken;
                         },
                         nullptr});
}

// ---- events ---------------------------------------------------------------------------------------------------------

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  std::lock_guard guard(api_lock);
  events.insert(*event = new CUevent_st);
  (*event)->timed = !(flags & cudaEventDisableTiming);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  std::lock_guard guard(api_lock);
  if (!events.count(event)) return refused(cudaErrorInvalidResourceHandle, "not an event");
  reach(event, event->recorded);
  events.erase(event);
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  std::lock_guard guard(api_lock);
  if (!events.count(event) || !known(stream))
    return refused(cudaErrorInvalidResourceHandle, "not an event or not a stream");
  event->capture = stream ? stream->capture : nullptr;
  if (event->capture) return cudaSuccess;  // an edge of the graph, no node
  event->stream = stream;
  const uint64_t record = ++event->recorded;
  return submit(stream, {Work::event, nullptr,
                         [event, record](const Launch*) {
                           if (!events.count(event)) return cudaSuccess;
                           event->at = std::chrono::steady_clock::now();
                           event->done = record;
                           return cudaSuccess;
                         },
                         nullptr});
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  std::lock_guard guard(api_lock);
  if (!events.count(event)) return refused(cudaErrorInvalidResourceHandle, "not an event");
  if (event->capture && capture_spoiled("cudaEventSynchronize")) return returned(cudaErrorStreamCaptureUnsupported);
  reach(event, event->recorded);
  return returned(std::exchange(broken, cudaSuccess));
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  std::lock_guard guard(api_lock);
  if (!events.count(event) || event->capture) return cudaEventSynchronize(event);
  if (event->done < event->recorded && event->stream && !event->stream->queue.empty()) step(event->stream);
  if (event->done < event->recorded && broken == cudaSuccess) return cudaErrorNotReady;
  return returned(std::exchange(broken, cudaSuccess));
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  std::lock_guard guard(api_lock);
  for (cudaEvent_t e : {begin, end}) {
    if (!events.count(e) || !e->recorded || !e->timed)
      return refused(cudaErrorInvalidResourceHandle, "not two recorded events with times");
    if (e->done < e->recorded) return cudaErrorNotReady;
  }
  *ms = std::chrono::duration<float, std::milli>(end->at - begin->at).count();
  return cudaSuccess;
}

// ---- graphs ---------------------------------------------------------------------------------------------------------

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  std::lock_guard guard(api_lock);
  if (!stream || !known(stream) || stream->capture)
    return refused(cudaErrorStreamCaptureUnsupported, "not a stream that can be captured");
  stream->capture = std::make_shared<std::vector<Work>>();
  stream->origin = true;
  stream->invalidated = false;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  std::lock_guard guard(api_lock);
  *graph = nullptr;
  if (!stream || !known(stream) || !stream->capture || !stream->origin)
    return refused(cudaErrorInvalidValue, "the stream is not captured");
  const Capture capture = stream->capture;
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
  std::lock_guard guard(api_lock);
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
  std::lock_guard guard(api_lock);
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
  std::lock_guard guard(api_lock);
  if (is_captured(stream)) return refused(cudaErrorStreamCaptureUnsupported, "a graph in a captured stream");
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
