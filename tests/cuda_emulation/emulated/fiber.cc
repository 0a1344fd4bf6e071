#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// Saves what a call preserves on the running stack, the stack pointer in *from, and goes on with *to.
extern "C" void pe_emulation_switch(void** from, void* to);

#if defined(__x86_64__)
asm(R"(
.text
.globl pe_emulation_switch
.hidden pe_emulation_switch
.type pe_emulation_switch, @function
pe_emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size pe_emulation_switch, .-pe_emulation_switch
)");
constexpr int kSavedWords = 8, kReturnWord = 6;  // six registers, the return address, a word of alignment
#elif defined(__aarch64__)
asm(R"(
.text
.globl pe_emulation_switch
.hidden pe_emulation_switch
.type pe_emulation_switch, @function
pe_emulation_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size pe_emulation_switch, .-pe_emulation_switch
)");
constexpr int kSavedWords = 20, kReturnWord = 11;
#else
#error "the emulation switches stacks on x86-64 and aarch64 only"
#endif

namespace cuda_emulation {

namespace {
constexpr size_t kGuard = 64 << 10;  // a page of any kernel
constexpr size_t kAllStacks = (kGuard + kStackBytes) * kStacks;

char* mapped_stacks() {
  void* p = mmap(nullptr, kAllStacks, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) abort();
  for (int i = 0; i < kStacks; ++i)
    if (mprotect(static_cast<char*>(p) + i * (kGuard + kStackBytes), kGuard, PROT_NONE) != 0) abort();
  return static_cast<char*>(p);
}

// One set in a process, though each library of kernels has this file: the guards are 4096 mappings of the 65530 that
// Linux allows. The environment says where they are, and of which process.
char* stacks() {
  static char* const base = [] {
    constexpr const char* kName = "PYENGINE_CUDA_EMULATION_STACKS";
    int pid = 0;
    void* p = nullptr;
    const char* text = getenv(kName);
    if (text && sscanf(text, "%d %p", &pid, &p) == 2 && pid == getpid()) return static_cast<char*>(p);
    char mine[64];
    p = mapped_stacks();
    snprintf(mine, sizeof mine, "%d %p", static_cast<int>(getpid()), p);
    setenv(kName, mine, 1);
    return static_cast<char*>(p);
  }();
  return base;
}
}  // namespace

char* fiber_stack(int index) { return stacks() + index * (kGuard + kStackBytes) + kGuard; }

bool in_fiber_stack(const void* address) {
  return reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(stacks()) < kAllStacks;
}

bool in_fiber_guard(const void* address, int* index) {
  const auto offset = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(stacks());
  if (offset >= kAllStacks) return false;
  *index = static_cast<int>(offset / (kGuard + kStackBytes));
  return offset % (kGuard + kStackBytes) < kGuard;
}

void prepare(Fiber& fiber, int index, void (*entry)()) {
  fiber.stack = fiber_stack(index);
  fiber.stack_bytes = kStackBytes;
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(fiber.stack, kStackBytes);  // a thread that was given up left its frames marked
#endif
  // Tops at different offsets: else all of them would share a few sets of the caches.
  char* top = fiber.stack + kStackBytes - 64 - static_cast<size_t>(index % 61) * 192;
  void** words = reinterpret_cast<void**>(top) - kSavedWords;
  memset(words, 0, kSavedWords * sizeof(void*));
  words[kReturnWord] = reinterpret_cast<void*>(entry);
  fiber.sp = words;
  fiber.fake_stack = nullptr;
}

void switch_to(Fiber& from, Fiber& to, [[maybe_unused]] bool from_ends) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(from_ends ? nullptr : &from.fake_stack, to.stack, to.stack_bytes);
#endif
  pe_emulation_switch(&from.sp, to.sp);
#ifdef __SANITIZE_ADDRESS__
  const void* bottom = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(from.fake_stack, &bottom, &bytes);
#endif
}

void on_fiber_start([[maybe_unused]] Fiber& came_from) {
#ifdef __SANITIZE_ADDRESS__
  const void* bottom = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  came_from.stack = static_cast<char*>(const_cast<void*>(bottom));
  came_from.stack_bytes = bytes;
#endif
}

}  // namespace cuda_emulation
