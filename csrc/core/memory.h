// Memory straight from the system: zero-filled, with huge pages for large blocks where there are any; or a file's
// pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace pe {

constexpr size_t kAlign = 64;
constexpr size_t kHugePage = size_t{2} << 20;
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kRedZone = 4096;  // what is read or written there, behind what was asked for, is reported
#else
constexpr size_t kRedZone = 0;
#endif

constexpr size_t align_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// Leaves nothing of these bytes in any cache, so that the next read comes from memory: a big last-level cache keeps a
// good part of what is read in circles.
void flush_caches(const uint8_t* p, size_t bytes);

class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t bytes);                // throws Error(PE_RESOURCE)
  static Memory of_file(int fd, size_t bytes);  // its first bytes, read-only; throws Error(PE_RESOURCE)
  ~Memory();
  Memory(Memory&& other) noexcept { swap(other); }
  Memory& operator=(Memory&& other) noexcept {
    swap(other);
    return *this;
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void fence(size_t at);  // the kRedZone bytes there are nobody's
  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void swap(Memory& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(mapped_, other.mapped_);
  }
  uint8_t* data_ = nullptr;
  size_t size_ = 0, mapped_ = 0;
};

}  // namespace pe
