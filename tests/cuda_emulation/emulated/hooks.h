// What a library that works on streams of the emulation, but is not linked with it, finds at the head of a stream.
#pragma once

#include <cstddef>
#include <functional>

namespace cuda_emulation {

struct StreamHooks {
  // Work of a library on a stream: done, or captured. 0: the stream took it.
  int (*submit)(void* stream, std::function<void()> work);
  bool (*in_device_memory)(const void*, size_t bytes);
};

}  // namespace cuda_emulation
