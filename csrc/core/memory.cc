#include "core/memory.h"

#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "core/status.h"

namespace pe {

namespace {
constexpr size_t kHugePage = size_t{2} << 20;
}

Memory::Memory(size_t bytes) {
  size_ = align_up(bytes ? bytes : 1, 4096);
  void* p = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) {
    const size_t wanted = size_;
    size_ = 0;
    fail(PE_RESOURCE, "cannot allocate %zu bytes", wanted);
  }
  data_ = static_cast<uint8_t*>(p);
#ifdef MADV_HUGEPAGE
  if (size_ >= 2 * kHugePage) madvise(data_, size_, MADV_HUGEPAGE);
#endif
}

Memory Memory::of_file(int fd, size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  if (p == MAP_FAILED) fail(PE_RESOURCE, "cannot map %zu bytes: %s", bytes, std::strerror(errno));
  Memory memory;
  memory.data_ = static_cast<uint8_t*>(p);
  memory.size_ = bytes;
  return memory;
}

void flush_caches(const uint8_t* p, size_t bytes) {
  for (size_t i = 0; i < bytes; i += kAlign) {
#if defined(__x86_64__)
    _mm_clflush(p + i);
#elif defined(__aarch64__)
    __asm__ __volatile__("dc civac, %0" : : "r"(p + i) : "memory");
#endif
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

Memory::~Memory() {
  if (data_) munmap(data_, size_);
}

}  // namespace pe
