#include "scheduler.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "fiber.h"
#include "memory.h"
#include "symbols.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace cuda_emulation {

thread_local bool inside_kernel = false;

namespace {

constexpr int kMaxWarps = kMaxThreads / kLanes;
constexpr int kMaxRelax = 50'000'000;

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
  bool committed;
  int group;
};
struct Thread {
  Fiber fiber;
  uint3 index{};
  bool done = false;
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
  int arrived = 0, predicate = 0, sum = 0, result = 0;
  Vote vote = Vote::none;
  Site site{};
};

// The one launch that runs.
std::mutex one_launch;
const Launch* launch = nullptr;
Fiber host;
Thread threads[kMaxThreads];
Warp warps[kMaxWarps];
Barrier barrier;
int thread_count = 0, warp_count = 0, done_count = 0, running = 0, relaxed = 0;
uint64_t phase = 0;
bool leave_warp = false, waited_for_previous = false;
std::string error;
uint64_t random_state = 0, chosen_seed = 0;

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

std::string where(int thread) {
  char text[160];
  const uint3 t = threads[thread].index;
  snprintf(text, sizeof text, "block (%u, %u, %u) of (%u, %u, %u), thread (%u, %u, %u)", blockIdx.x, blockIdx.y,
           blockIdx.z, gridDim.x, gridDim.y, gridDim.z, t.x, t.y, t.z);
  return symbol_name(launch->function) + ", " + text;
}

const char* base_name(const char* file) {
  const char* slash = file ? strrchr(file, '/') : nullptr;
  return slash ? slash + 1 : file;
}

// After `error` is set. What stands on the fiber's stack is never destroyed, so nothing there may own memory.
[[noreturn]] void give_up() {
  switch_to(threads[running].fiber, host, true);
  abort();
}

std::string at(Site site) { return std::string(base_name(site.file)) + ":" + std::to_string(site.line) + ": "; }

void block_thread(const char* what, Site site) {
  Thread& t = threads[running];
  t.waits_for = what;
  t.site = site;
  const int self = running;
  switch_to(t.fiber, host);
  t.waits_for = nullptr;
  running = self;
}

void set_ready(int thread, bool on) {
  Warp& w = warps[thread / kLanes];
  const uint32_t bit = 1u << (thread % kLanes);
  w.ready = on ? w.ready | bit : w.ready & ~bit;
}

void thread_main() {
  on_fiber_start(host);
  launch->body();
  Thread& t = threads[running];
  t.done = true;
  ++done_count;
  set_ready(running, false);
  switch_to(t.fiber, host, true);
  abort();
}

void resume(int thread) {
  running = thread;
  threadIdx = threads[thread].index;
  inside_kernel = true;
  switch_to(host, threads[thread].fiber);
  inside_kernel = false;
}

void start_block(uint64_t block) {
  const dim3 g = launch->grid, b = launch->block;
  blockIdx = {static_cast<unsigned>(block % g.x), static_cast<unsigned>(block / g.x % g.y),
              static_cast<unsigned>(block / g.x / g.y)};
  thread_count = static_cast<int>(b.x * b.y * b.z);
  warp_count = (thread_count + kLanes - 1) / kLanes;
  done_count = relaxed = 0;
  barrier = {};
  for (int i = 0; i < warp_count; ++i) {
    const int lanes = std::min(kLanes, thread_count - i * kLanes);
    warps[i] = {};
    warps[i].lanes = warps[i].ready = lanes == kLanes ? ~0u : (1u << lanes) - 1;
  }
  for (int i = 0; i < thread_count; ++i) {
    Thread& t = threads[i];
    prepare(t.fiber, i, thread_main);
    const auto n = static_cast<unsigned>(i);
    t.index = {n % b.x, n / b.x % b.y, n / b.x / b.y};
    t.done = false;
    t.waits_for = nullptr;
    t.mask = 0;
    t.copies.clear();
    t.groups = 0;
  }
  fill_shared_memory(launch->shared_bytes);
}

// One warp as far as it gets; returns whether any lane ran.
bool run_warp(int index) {
  Warp& w = warps[index];
  const uint64_t started = phase;
  bool any = false;
  leave_warp = false;
  while (w.ready && !leave_warp) {
    Walk lanes(kLanes);
    for (int i = 0; i < kLanes && !leave_warp; ++i) {
      const int lane = static_cast<int>(lanes.next());
      if (!(w.ready >> lane & 1)) continue;
      any = true;
      resume(index * kLanes + lane);
      if (!error.empty() || phase != started) return true;
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
  while (threads[first].done) ++first;
  const Thread& t = threads[first];
  error = where(first) + ": " + waiting(t) + " for threads that do not come";
  const int from = t.mask ? first / kLanes * kLanes : 0,
            to = t.mask ? std::min(from + kLanes, thread_count) : thread_count;
  for (int i = from; i < to; ++i) {
    const Thread& o = threads[i];
    if (t.mask && !(t.mask >> (i % kLanes) & 1)) continue;
    if (!o.done && o.mask == t.mask && o.site.line == t.site.line && o.site.file == t.site.file) continue;
    error += ": thread " + std::to_string(i) + (o.done ? std::string(" has ended") : " " + waiting(o));
    return;
  }
}

void run_block(uint64_t block) {
  start_block(block);
  while (done_count < thread_count) {
    bool any = false;
    const uint64_t started = phase;
    Walk order(static_cast<uint64_t>(warp_count));
    for (int i = 0; i < warp_count && phase == started; ++i) {
      any |= run_warp(static_cast<int>(order.next()));
      if (!error.empty()) return;
    }
    if (!any && phase == started && done_count < thread_count) return report_deadlock();
  }
  if (const char* what = check_shared_memory()) error = where(0) + ": " + what;
}

}  // namespace

uint64_t seed() {
  if (!chosen_seed) {
    const char* text = getenv("PYENGINE_CUDA_EMULATION_SEED");
    chosen_seed = text ? strtoull(text, nullptr, 10) : 1;
  }
  return chosen_seed;
}

void set_seed(uint64_t value) {
  chosen_seed = value;
  random_state = 0;
}

std::string run_grid(const Launch& l) {
  std::lock_guard lock(one_launch);
  install_fault_handler();
  if (!random_state) random_state = seed() * 0x2545f4914f6cdd1du + 1;
  launch = &l;
  begin_shared_memory(l.function);
  blockDim = l.block;
  gridDim = l.grid;
  error.clear();
  waited_for_previous = false;
  const uint64_t blocks = uint64_t{l.grid.x} * l.grid.y * l.grid.z;
  Walk order(blocks);
  for (uint64_t i = 0; i < blocks && error.empty(); ++i) run_block(order.next());
  if (error.empty() && l.overlaps_previous && !waited_for_previous)
    error = symbol_name(l.function) +
            ": no thread called wait_for_previous(), so that a kernel behind this one may begin before those in front "
            "of it have ended";
  launch = nullptr;
  return std::exchange(error, {});
}

int current_lane() { return running % kLanes; }

void thread_error(Site site, const char* format, ...) {
  char text[512];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  if (!inside_kernel) {
    fprintf(stderr, "CUDA emulation, outside a kernel: %s%s\n", site.file ? at(site).c_str() : "", text);
    abort();
  }
  error = where(running) + ": " + (site.file ? at(site) : std::string()) + text;
  give_up();
}

void relax(Site site) {
  if (!inside_kernel) thread_error(site, "device code called on the host");
  if (++relaxed > kMaxRelax) thread_error(site, "spins without end");
  if (relaxed % 256) return;
  leave_warp = true;
  block_thread("its turn", site);
}

void warp_op(WarpOp& op) {
  if (!inside_kernel) thread_error(op.site, "%s called on the host", op.name);
  Warp& w = warps[running / kLanes];
  const int lane = current_lane();
  if (!(op.mask >> lane & 1)) thread_error(op.site, "%s: the mask %08x lacks the lane itself", op.name, op.mask);
  if (op.mask & ~w.lanes) thread_error(op.site, "%s: the mask %08x names lanes that do not exist", op.name, op.mask);
  w.ops[lane] = &op;
  bool all = true;
  for (int l = 0; l < kLanes; ++l) {
    if (!(op.mask >> l & 1)) continue;
    if (threads[running / kLanes * kLanes + l].done)
      thread_error(op.site, "%s: the mask %08x names lane %d, which has ended", op.name, op.mask, l);
    const WarpOp* other = w.ops[l];
    if (!other || other->mask != op.mask || other->finish != op.finish)
      all = false;  // it may yet come here, from an exchange of fewer lanes
    else if (op.aligned && (other->site.line != op.site.line || other->site.file != op.site.file))
      thread_error(op.site, "%s, while lane %d is at %s:%d", op.name, l, base_name(other->site.file), other->site.line);
  }
  if (!all) {
    set_ready(running, false);
    threads[running].mask = op.mask;
    block_thread(op.name, op.site);
    threads[running].mask = 0;
    return;
  }
  WarpOp* ops[kLanes] = {};
  const int first = running / kLanes * kLanes;
  for (int l = 0; l < kLanes; ++l)
    if (op.mask >> l & 1) ops[l] = std::exchange(w.ops[l], nullptr);
  const Fault fault = op.finish(ops);
  if (fault.what) {
    running = first + fault.lane;
    error = where(running) + ": " + at(ops[fault.lane]->site) + op.name + ": " + fault.what;
    running = first + lane;
    give_up();
  }
  w.ready |= op.mask;
}

int block_barrier(Vote vote, int predicate, Site site) {
  if (!inside_kernel) thread_error(site, "__syncthreads called on the host");
  if (barrier.arrived && (barrier.site.line != site.line || barrier.site.file != site.file || barrier.vote != vote))
    thread_error(site, "a barrier, while other threads of the block wait at %s:%d", base_name(barrier.site.file),
                 barrier.site.line);
  barrier.site = site;
  barrier.vote = vote;
  barrier.sum += predicate != 0;
  set_ready(running, false);
  if (++barrier.arrived == thread_count) {
    const int sum = std::exchange(barrier.sum, 0);
    barrier.arrived = 0;
    barrier.result = vote == Vote::count ? sum : vote == Vote::all ? sum == thread_count : sum > 0;
    for (int i = 0; i < warp_count; ++i) warps[i].ready = warps[i].lanes;
    ++phase;
  }
  block_thread("a barrier of the block", site);
  return barrier.result;
}

void copy_async(void* to, const void* from, size_t bytes, Site site) {
  if (reinterpret_cast<uintptr_t>(to) % bytes || reinterpret_cast<uintptr_t>(from) % bytes)
    thread_error(site, "copy_async: %p or %p is not aligned to %zu bytes", to, from, bytes);
  if (!in_shared_memory(to, bytes)) thread_error(site, "copy_async: %p is not shared memory", to);
  memset(to, kGarbage, bytes);
  threads[running].copies.push_back({to, from, bytes, false, 0});
}

void copy_async_commit() {
  Thread& t = threads[running];
  for (Copy& c : t.copies)
    if (!std::exchange(c.committed, true)) c.group = t.groups;
  ++t.groups;
}

void copy_async_wait(int groups_left) {
  Thread& t = threads[running];
  std::vector<Copy> later;
  for (const Copy& c : t.copies)
    if (c.committed && c.group < t.groups - groups_left)
      memcpy(c.to, c.from, c.bytes);
    else
      later.push_back(c);
  t.copies.swap(later);
}

void previous_grid_wait() { waited_for_previous = true; }

}  // namespace cuda_emulation
