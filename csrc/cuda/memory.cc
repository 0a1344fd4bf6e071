#include "cuda/memory.h"

#include <cstdio>

#include "core/status.h"

namespace pe::cuda {

void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // an error that does not stick is told once
  fail(PE_RESOURCE, "CUDA: %s: %s", what, cudaGetErrorString(error));
}

std::string text_of_bytes(size_t bytes) {
  const char* const units[] = {"bytes", "KiB", "MiB", "GiB"};
  double x = static_cast<double>(bytes);
  size_t unit = 0;
  for (; x >= 1024.0 && unit < 3; ++unit) x /= 1024.0;
  char text[32];
  std::snprintf(text, sizeof text, unit ? "%.2f %s" : "%.0f %s", x, units[unit]);
  return text;
}

void check_room(size_t bytes, const std::string& what) {
  size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "asking for free memory");
  if (bytes <= free) return;
  fail(PE_RESOURCE, "not enough memory on the device: needs %s (%s); free %s of %s", text_of_bytes(bytes).c_str(),
       what.c_str(), text_of_bytes(free).c_str(), text_of_bytes(total).c_str());
}

DeviceMemory::DeviceMemory(size_t bytes) {
  if (!bytes) return;
  void* p = nullptr;
  check_cuda(cudaMalloc(&p, bytes), ("allocating " + text_of_bytes(bytes)).c_str());
  data_ = static_cast<uint8_t*>(p);
  size_ = bytes;
}

DeviceMemory::~DeviceMemory() {
  if (data_) cudaFree(data_);
}

PinnedMemory::PinnedMemory(size_t bytes) {
  if (!bytes) return;
  void* p = nullptr;
  check_cuda(cudaMallocHost(&p, bytes), ("allocating " + text_of_bytes(bytes) + " of the host for copies").c_str());
  data_ = static_cast<uint8_t*>(p);
  size_ = bytes;
}

PinnedMemory::~PinnedMemory() {
  if (data_) cudaFreeHost(data_);
}

Event::Event(bool timed) {
  const auto made = timed ? cudaEventCreate(&event_) : cudaEventCreateWithFlags(&event_, cudaEventDisableTiming);
  check_cuda(made, "making an event");
}

Event::~Event() {
  if (event_) cudaEventDestroy(event_);
}

double Event::ms_since(const Event& begin) const {
  float ms = 0;
  check_cuda(cudaEventElapsedTime(&ms, begin.event_, event_), "reading an event");
  return static_cast<double>(ms);
}

}  // namespace pe::cuda
