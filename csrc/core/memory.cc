#include "core/memory.h"

#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include "core/status.h"

namespace pe {

namespace {
constexpr size_t kPage = 4096;
}  // namespace

Memory::Memory(size_t bytes) {
  const size_t mapped = align_up(bytes ? bytes : 1, kPage) + kRedZone;
  void* p = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) fail(PE_RESOURCE, "cannot allocate %zu bytes", mapped);
  data_ = static_cast<uint8_t*>(p);
  size_ = kRedZone ? bytes : mapped;
  mapped_ = mapped;
#ifdef MADV_HUGEPAGE
  if (mapped_ >= kHugePage) madvise(data_, mapped_, MADV_HUGEPAGE);
#endif
#if defined(__SANITIZE_ADDRESS__)
  ASAN_POISON_MEMORY_REGION(data_ + size_, mapped_ - size_);
#endif
}

void Memory::fence([[maybe_unused]] size_t at) {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_POISON_MEMORY_REGION(data_ + at, kRedZone);
#endif
}

Memory Memory::of_file(int fd, size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  if (p == MAP_FAILED) fail(PE_RESOURCE, "cannot map %zu bytes: %s", bytes, std::strerror(errno));
#ifdef MADV_HUGEPAGE
  madvise(p, bytes, MADV_HUGEPAGE);  // what is not in memory yet is read in huge pages, where the file system has them
#endif
  Memory memory;
  memory.data_ = static_cast<uint8_t*>(p);
  memory.size_ = memory.mapped_ = bytes;
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
  if (!data_) return;
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(data_, mapped_);
#endif
  munmap(data_, mapped_);
}

}  // namespace pe
