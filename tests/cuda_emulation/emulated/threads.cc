// What threads ask for: barriers, exchanges of a warp, copies that arrive later.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "block.h"
#include "memory.h"

namespace cuda_emulation {

namespace {
constexpr int kMaxRelax = 50'000'000;
bool same(Site a, Site b) { return a.line == b.line && a.file == b.file; }
}  // namespace

int current_lane() { return block->running % kLanes; }

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
  error = where(block->running) + ": " + (site.file ? at(site) : std::string()) + text;
  give_up();
}

void relax(Site site) {
  if (!inside_kernel) thread_error(site, "device code called on the host");
  if (++block->relaxed > kMaxRelax) thread_error(site, "spins without end");
  if (block->relaxed % 256) return;
  block->leave_warp = true;
  block_thread("its turn", site);
}

// Whether all lanes of the mask stand at this exchange.
static bool all_arrived(const WarpOp& op, const Warp& w, int first) {
  bool all = true;
  for (int l = 0; l < kLanes; ++l) {
    if (!(op.mask >> l & 1)) continue;
    if (block->threads[first + l].done)
      thread_error(op.site, "%s: the mask %08x names lane %d, which has ended", op.name, op.mask, l);
    const WarpOp* other = w.ops[l];
    if (!other || other->mask != op.mask || other->finish != op.finish)
      all = false;  // it may yet come here, from an exchange of fewer lanes
    else if (op.aligned && !same(other->site, op.site))
      thread_error(op.site, "%s, while lane %d is at %s:%d", op.name, l, base_name(other->site.file), other->site.line);
  }
  return all;
}

void warp_op(WarpOp& op) {
  if (!inside_kernel) thread_error(op.site, "%s called on the host", op.name);
  const int self = block->running, lane = self % kLanes, first = self - lane;
  Warp& w = block->warps[self / kLanes];
  if (!(op.mask >> lane & 1)) thread_error(op.site, "%s: the mask %08x lacks the lane itself", op.name, op.mask);
  if (op.mask & ~w.lanes) thread_error(op.site, "%s: the mask %08x names lanes that do not exist", op.name, op.mask);
  w.ops[lane] = &op;
  if (!all_arrived(op, w, first)) {
    set_ready(self, false);
    block->threads[self].mask = op.mask;
    block_thread(op.name, op.site);
    block->threads[self].mask = 0;
    return;
  }
  WarpOp* ops[kLanes] = {};
  for (int l = 0; l < kLanes; ++l)
    if (op.mask >> l & 1) ops[l] = std::exchange(w.ops[l], nullptr);
  const Fault fault = op.finish(ops);
  if (fault.what) {
    error = where(first + fault.lane) + ": " + at(ops[fault.lane]->site) + op.name + ": " + fault.what;
    give_up();
  }
  w.ready |= op.mask;
}

int block_barrier(Vote vote, int predicate, Site site) {
  if (!inside_kernel) thread_error(site, "__syncthreads called on the host");
  Barrier& b = block->barrier;
  if (b.arrived && (!same(b.site, site) || b.vote != vote))
    thread_error(site, "a barrier, while other threads of the block wait at %s:%d", base_name(b.site.file),
                 b.site.line);
  b.site = site;
  b.vote = vote;
  b.sum += predicate != 0;
  set_ready(block->running, false);
  if (++b.arrived == block->thread_count) {
    const int sum = std::exchange(b.sum, 0);
    b.arrived = 0;
    b.result = vote == Vote::count ? sum : vote == Vote::all ? sum == block->thread_count : sum > 0;
    for (int i = 0; i < block->warp_count; ++i) block->warps[i].ready = block->warps[i].lanes;
    ++block->phase;
  }
  block_thread("a barrier of the block", site);
  return b.result;
}

void copy_async(void* to, const void* from, size_t bytes, Site site) {
  if (reinterpret_cast<uintptr_t>(to) % bytes || reinterpret_cast<uintptr_t>(from) % bytes)
    thread_error(site, "copy_async: %p or %p is not aligned to %zu bytes", to, from, bytes);
  if (!in_shared_memory(to, bytes)) thread_error(site, "copy_async: %p is not shared memory", to);
  memset(to, kGarbage, bytes);
  block->threads[block->running].copies.push_back({to, from, bytes, false, 0});
}

void copy_async_commit() {
  Thread& t = block->threads[block->running];
  for (Copy& c : t.copies)
    if (!std::exchange(c.committed, true)) c.group = t.groups;
  ++t.groups;
}

void copy_async_wait(int groups_left) {
  Thread& t = block->threads[block->running];
  size_t kept = 0;
  for (const Copy& c : t.copies)
    if (c.committed && c.group < t.groups - groups_left)
      memcpy(c.to, c.from, c.bytes);
    else
      t.copies[kept++] = c;
  t.copies.resize(kept);
}

void previous_grid_wait(Site site) {
  if (!inside_kernel) thread_error(site, "device code called on the host");
  block->waited_for_previous = true;
  if (!block->ahead) return;
  set_ready(block->running, false);
  block->threads[block->running].waits_for_grid = true;
  block_thread("the grid in front", site);
}

void next_grid_may_start() { block->let_next_start = true; }

}  // namespace cuda_emulation
