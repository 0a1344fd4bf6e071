// Work on streams. It waits in a queue until something waits for it (or an event, a copy to or from memory that is not
// pinned, or the default stream asks for it): what reads a result too early, or overwrites what a copy has yet to read,
// shows. While a stream is captured, its work is written down.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_runtime.h"

namespace cuda_emulation {

// `kind` and `function` are what a graph's topology is compared by.
struct Work {
  enum Kind { kernel, copy, set, event, wait } kind;
  const void* function = nullptr;
  std::function<cudaError_t(const Launch* next)> run;
  std::shared_ptr<const Launch> launch;  // of a kernel
};

extern std::recursive_mutex api_lock;

cudaError_t returned(cudaError_t);                  // remembered as the last error
cudaError_t refused(cudaError_t, std::string why);  // with what cudaGetErrorString is to say
std::string& failure();

cudaError_t submit(cudaStream_t, Work);
// All its work; nullptr: of every stream. Returns, once, what a kernel did wrong: until then nothing else is taken.
cudaError_t finish(cudaStream_t);
void settle();  // the same of every stream, but leaves it to others to return it
// What waits for the device, or allocates, while a stream is captured: the capture is lost, as on the device.
bool capture_spoiled(const char* what);
bool is_captured(cudaStream_t);
void spoil(cudaStream_t);

}  // namespace cuda_emulation
