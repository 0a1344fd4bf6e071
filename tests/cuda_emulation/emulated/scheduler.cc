// Which thread runs: blocks, warps and lanes in drawn orders, and the part of a grid that overlaps with the one in
// front.
#include "scheduler.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <utility>

#include "block.h"
#include "memory.h"
#include "symbols.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace cuda_emulation {

thread_local bool inside_kernel = false;
Block* block = nullptr;
Fiber host;
std::string error;

namespace {

#ifdef __SANITIZE_ADDRESS__
constexpr bool kOverlap = false;  // static shared variables could not be told from others, to keep two blocks' apart
#else
constexpr bool kOverlap = true;
#endif

// A block of the grid that runs and, with it, one of the next grid, ahead as far as its wait_for_previous().
Block blocks[2];
Block* ahead = nullptr;
std::mutex one_launch;
std::map<const void*, bool> lets_next_start;  // whether every block of the kernel did, the last time
uint64_t random_state = 0;

uint64_t seed() {
  static const char* const text = getenv("PYENGINE_CUDA_EMULATION_SEED");
  return text ? strtoull(text, nullptr, 10) : 1;
}

uint64_t random() {  // splitmix64
  uint64_t z = random_state += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// A walk over 0..n-1 in steps of a number prime to n.
struct Walk {
  uint64_t n, at, step;
  explicit Walk(uint64_t count) : n(count), at(random() % count), step(1) {
    if (n < 3) return;
    do step = 1 + random() % (n - 1);
    while (std::gcd(step, n) != 1);
  }
  uint64_t next() { return std::exchange(at, (at + step) % n); }
};

void thread_main() {
  on_fiber_start(host);
  block->launch->body();
  Thread& t = block->threads[block->running];
  t.done = true;
  ++block->done_count;
  set_ready(block->running, false);
  switch_to(t.fiber, host, true);
  abort();
}

void resume(int thread) {
  block->running = thread;
  threadIdx = block->threads[thread].index;
  inside_kernel = true;
  switch_to(host, block->threads[thread].fiber);
  inside_kernel = false;
}

uint64_t block_count(const Launch& l) { return uint64_t{l.grid.x} * l.grid.y * l.grid.z; }

// Makes it the block that runs.
void select(Block& b) {
  const dim3 g = b.launch->grid;
  block = &b;
  blockDim = b.launch->block;
  gridDim = g;
  blockIdx = {static_cast<unsigned>(b.number % g.x), static_cast<unsigned>(b.number / g.x % g.y),
              static_cast<unsigned>(b.number / g.x / g.y)};
}

void start_block(Block& b, const Launch& launch, uint64_t number) {
  b.launch = &launch;
  b.number = number;
  b.slot = static_cast<int>(&b - blocks);
  select(b);
  const dim3 d = launch.block;
  b.thread_count = static_cast<int>(d.x * d.y * d.z);
  b.warp_count = (b.thread_count + kLanes - 1) / kLanes;
  b.done_count = b.relaxed = 0;
  b.barrier = {};
  b.ahead = b.waited_for_previous = b.let_next_start = false;
  for (int i = 0; i < b.warp_count; ++i) {
    const int lanes = std::min(kLanes, b.thread_count - i * kLanes);
    b.warps[i] = {};
    b.warps[i].lanes = b.warps[i].ready = lanes == kLanes ? ~0u : (1u << lanes) - 1;
  }
  for (int i = 0; i < b.thread_count; ++i) {
    Thread& t = b.threads[i];
    prepare(t.fiber, b.slot * kMaxThreads + i, thread_main);
    const auto n = static_cast<unsigned>(i);
    t.index = {n % d.x, n / d.x % d.y, n / d.x / d.y};
    t.done = t.waits_for_grid = false;
    t.waits_for = nullptr;
    t.mask = 0;
    t.copies.clear();
    t.groups = 0;
  }
  fill_shared_memory(b.slot, launch.shared_bytes);
}

// One warp as far as it gets; returns whether any lane ran.
bool run_warp(int index) {
  Warp& w = block->warps[index];
  const uint64_t started = block->phase;
  bool any = false;
  block->leave_warp = false;
  while (w.ready && !block->leave_warp) {
    Walk lanes(kLanes);
    for (int i = 0; i < kLanes && !block->leave_warp; ++i) {
      const int lane = static_cast<int>(lanes.next());
      if (!(w.ready >> lane & 1)) continue;
      any = true;
      resume(index * kLanes + lane);
      if (!error.empty() || block->phase != started) return true;
    }
  }
  return any;
}

std::string waiting(const Thread& t) {
  char mask[24] = "";
  if (t.mask) snprintf(mask, sizeof mask, " with mask %08x", t.mask);
  return std::string("waits at ") + base_name(t.site.file) + ":" + std::to_string(t.site.line) + " (" + t.waits_for +
         mask + ")";
}

// Names the first thread that waits and one that is elsewhere: of its warp, where it waits for its warp.
void report_deadlock() {
  int first = 0;
  while (block->threads[first].done) ++first;
  const Thread& t = block->threads[first];
  error = where(first) + ": " + waiting(t) + " for threads that do not come";
  const int warp = first / kLanes * kLanes, count = block->thread_count;
  for (int i = t.mask ? warp : 0; i < (t.mask ? std::min(warp + kLanes, count) : count); ++i) {
    const Thread& o = block->threads[i];
    if (t.mask && !(t.mask >> (i % kLanes) & 1)) continue;
    if (!o.done && o.mask == t.mask && o.site.line == t.site.line && o.site.file == t.site.file) continue;
    error += ": thread " + std::to_string(i) + (o.done ? std::string(" has ended") : " " + waiting(o));
    return;
  }
}

// The selected block to its end or, ahead of the grid in front, until all wait for that.
void run_block() {
  while (block->done_count < block->thread_count) {
    bool any = false;
    const uint64_t started = block->phase;
    Walk order(static_cast<uint64_t>(block->warp_count));
    for (int i = 0; i < block->warp_count && block->phase == started; ++i) {
      any |= run_warp(static_cast<int>(order.next()));
      if (!error.empty()) return;
    }
    if (any || block->phase != started) continue;
    if (!block->ahead) report_deadlock();
    return;
  }
}

void end_block(bool& waited, bool& let_next_start) {
  if (!error.empty()) return;
  if (const char* what = check_shared_memory()) error = where(0) + ": " + what;
  waited |= block->waited_for_previous;
  let_next_start &= block->let_next_start;
}

void start_ahead(const Launch& next) {
  Block& b = blocks[1];
  begin_shared_memory(next.function);
  start_block(b, next, random() % block_count(next));
  b.ahead = true;
  run_block();
  suspend_shared_memory(b.slot);
  ahead = &b;
}

void go_on_from_ahead(const Launch& l, bool& waited, bool& let_next_start) {
  if (!ahead || ahead->launch != &l) return;
  Block& b = *std::exchange(ahead, nullptr);
  select(b);
  resume_shared_memory(b.slot);
  b.ahead = false;
  for (int i = 0; i < b.thread_count; ++i)
    if (std::exchange(b.threads[i].waits_for_grid, false)) set_ready(i, true);
  run_block();
  end_block(waited, let_next_start);
}

}  // namespace

std::string where(int thread) {
  char text[160];
  const uint3 t = block->threads[thread].index;
  snprintf(text, sizeof text, "block (%u, %u, %u) of (%u, %u, %u), thread (%u, %u, %u)", blockIdx.x, blockIdx.y,
           blockIdx.z, gridDim.x, gridDim.y, gridDim.z, t.x, t.y, t.z);
  return symbol_name(block->launch->function) + ", " + text;
}

const char* base_name(const char* file) {
  const char* slash = file ? strrchr(file, '/') : nullptr;
  return slash ? slash + 1 : file;
}

std::string at(Site site) { return std::string(base_name(site.file)) + ":" + std::to_string(site.line) + ": "; }

void give_up() {
  switch_to(block->threads[block->running].fiber, host, true);
  abort();
}

void block_thread(const char* what, Site site) {
  Thread& t = block->threads[block->running];
  t.waits_for = what;
  t.site = site;
  switch_to(t.fiber, host);
  t.waits_for = nullptr;
}

void set_ready(int thread, bool on) {
  Warp& w = block->warps[thread / kLanes];
  const uint32_t bit = 1u << (thread % kLanes);
  w.ready = on ? w.ready | bit : w.ready & ~bit;
}

std::string run_grid(const Launch& l, const Launch* next) {
  std::lock_guard lock(one_launch);
  install_fault_handler();
  if (!random_state) random_state = seed() * 0x2545f4914f6cdd1du + 1;
  error.clear();
  bool waited = false, let_next_start = true;
  const uint64_t count = block_count(l);
  const uint64_t first = ahead && ahead->launch == &l ? ahead->number : count;
  begin_shared_memory(l.function);
  go_on_from_ahead(l, waited, let_next_start);
  ahead = nullptr;
  if (kOverlap && error.empty() && next && next->overlaps_previous && lets_next_start[l.function]) {
    start_ahead(*next);
    begin_shared_memory(l.function);
  }
  Walk order(count);
  for (uint64_t i = 0; i < count && error.empty(); ++i) {
    const uint64_t number = order.next();
    if (number == first) continue;
    start_block(blocks[0], l, number);
    run_block();
    end_block(waited, let_next_start);
  }
  lets_next_start[l.function] = let_next_start;
  if (error.empty() && l.overlaps_previous && !waited)
    error = symbol_name(l.function) +
            ": no thread called wait_for_previous(), so that a kernel behind this one may begin before those in front "
            "of it have ended";
  if (!error.empty()) ahead = nullptr;
  return std::exchange(error, {});
}

}  // namespace cuda_emulation
