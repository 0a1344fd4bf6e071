// What the runtime owns of a device: memory, memory of the host that copies take without waiting, events.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace pe::cuda {

void check_cuda(cudaError_t error, const char* what);  // throws Error(PE_RESOURCE)
std::string text_of_bytes(size_t bytes);               // "1.50 GiB"
// Throws Error(PE_RESOURCE) where `bytes` more do not fit the device; `what` says what they are for.
void check_room(size_t bytes, const std::string& what);

// Not zeroed.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(size_t bytes);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept { swap(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    swap(other);
    return *this;
  }
  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void swap(DeviceMemory& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

class PinnedMemory {
 public:
  PinnedMemory() = default;
  explicit PinnedMemory(size_t bytes);
  ~PinnedMemory();
  PinnedMemory(PinnedMemory&& other) noexcept { swap(other); }
  PinnedMemory& operator=(PinnedMemory&& other) noexcept {
    swap(other);
    return *this;
  }
  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void swap(PinnedMemory& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

class Event {
 public:
  explicit Event(bool timed = true);
  ~Event();
  Event(Event&& other) noexcept { std::swap(event_, other.event_); }
  Event& operator=(Event&&) = delete;
  void record(cudaStream_t stream) { check_cuda(cudaEventRecord(event_, stream), "an event"); }
  void wait() { check_cuda(cudaEventSynchronize(event_), "waiting for the device"); }
  double ms_since(const Event& begin) const;

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace pe::cuda
