// Threads of a block as fibers of one host thread: they run one after another, in an order that the seed decides, until
// they stand at a barrier or at an exchange of a warp.
//
// The order is drawn anew after every barrier and favours skew: a warp runs as far as it can before another begins, so
// that what a missing barrier or __syncwarp would leave to chance on the device comes out wrong here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "types.h"

namespace cuda_emulation {

constexpr int kLanes = 32, kMaxThreads = 1024;

struct Site {
  const char* file;
  int line;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

// What a lane brings to an exchange with the lanes of `mask`. The last to arrive runs `finish` for all of them: ops[l]
// is nullptr for lanes outside the mask. It returns the lane that did something wrong and why, or {-1, nullptr}.
struct Fault {
  int lane = -1;
  const char* what = nullptr;
};
struct WarpOp {
  const char* name;
  uint32_t mask;
  Site site;
  const void* in;
  void* out;
  int parameter, width;
  Fault (*finish)(WarpOp* const* ops);
  bool aligned = false;  // all lanes at the same place in the source (mma.sync.aligned)
};
void warp_op(WarpOp&);

enum class Vote { none, count, all, any };
int block_barrier(Vote, int predicate, Site);

// Ends the launch with an error that names the kernel, the block and the thread. Outside a kernel: aborts.
[[noreturn]] void thread_error(Site, const char* format, ...) __attribute__((format(printf, 2, 3)));
// What a thread does that spins, or that others may be waiting for: now and then others run. Endless spinning is an
// error.
void relax(Site);

uint8_t* dynamic_shared_memory();
int current_lane();

// cp.async: `to` holds garbage until the thread waits for the group.
void copy_async(void* to, const void* from, size_t bytes, Site);
void copy_async_commit();
void copy_async_wait(int groups_left);
void previous_grid_wait(Site);
void next_grid_may_start();

struct Launch {
  const void* function = nullptr;
  std::function<void()> body;
  dim3 grid, block;
  size_t shared_bytes = 0;
  bool overlaps_previous = false;  // programmatic stream serialization
};
// Runs every thread; returns what went wrong, or an empty string. next: what the stream does behind, and will run next;
// where it may overlap with this grid, and the kernel's blocks let it start, one of its blocks runs up to its
// wait_for_previous() in front of this grid, so that what it reads there too early shows.
std::string run_grid(const Launch&, const Launch* next);

extern thread_local bool inside_kernel;

}  // namespace cuda_emulation

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = cuda_emulation::kLanes;
