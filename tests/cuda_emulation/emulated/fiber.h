// A stack and a place in a function to go on at. x86-64 and aarch64; AddressSanitizer is told of every switch.
#pragma once

#include <cstddef>

namespace cuda_emulation {

struct Fiber {
  void* sp = nullptr;  // saved registers on the stack
  char* stack = nullptr;
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;  // AddressSanitizer's
};

// The stacks are mapped once and kept, each with pages below that cannot be touched.
constexpr int kStacks = 2048;
char* fiber_stack(int index);
bool in_fiber_guard(const void* address, int* index);
bool in_fiber_stack(const void* address);
constexpr size_t kStackBytes = 256 << 10;

// The fiber begins with entry() at the first switch to it. entry never returns.
void prepare(Fiber&, int index, void (*entry)());
void switch_to(Fiber& from, Fiber& to, bool from_ends = false);
void on_fiber_start(Fiber& came_from);

}  // namespace cuda_emulation
