// The state of a block that runs, shared by scheduler.cc, which decides who runs, and threads.cc, what threads ask for.
#pragma once

#include <string>
#include <vector>

#include "fiber.h"
#include "scheduler.h"

namespace cuda_emulation {

constexpr int kMaxWarps = kMaxThreads / kLanes;

struct Copy {  // cp.async
  void* to;
  const void* from;
  size_t bytes;
  bool committed;
  int group;
};
struct Thread {
  Fiber fiber;
  uint3 index{};
  bool done = false, waits_for_grid = false;
  const char* waits_for = nullptr;
  uint32_t mask = 0;  // of the exchange it waits in
  Site site{};
  std::vector<Copy> copies;
  int groups = 0;
};
struct Warp {
  uint32_t lanes = 0, ready = 0;
  WarpOp* ops[kLanes] = {};
};
struct Barrier {
  int arrived = 0, sum = 0, result = 0;
  Vote vote = Vote::none;
  Site site{};
};
struct Block {
  const Launch* launch = nullptr;
  uint64_t number = 0;
  int slot = 0;  // which stacks and which shared memory are its own
  Thread threads[kMaxThreads];
  Warp warps[kMaxWarps];
  Barrier barrier;
  int thread_count = 0, warp_count = 0, done_count = 0, running = 0, relaxed = 0;
  uint64_t phase = 0;  // barriers passed
  bool leave_warp = false;
  bool ahead = false;  // runs before the grid in front, up to wait_for_previous()
  bool waited_for_previous = false, let_next_start = false;
};

extern Block* block;  // the one that runs
extern Fiber host;
extern std::string error;  // of the launch

std::string where(int thread);
std::string at(Site);
const char* base_name(const char* file);
void set_ready(int thread, bool on);
void block_thread(const char* what, Site);  // others run until it is ready again
// After `error` is set. What stands on the fiber's stack is never destroyed, so nothing there may own memory.
[[noreturn]] void give_up();

}  // namespace cuda_emulation
