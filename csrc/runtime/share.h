// How the threads inside a run share work and meet: the templates of CpuProgram that its ops use.
#pragma once

#include <algorithm>

#include "runtime/cpu_program.h"

namespace pe {

constexpr int64_t kFetchBytes = 64 << 10;  // of the next weights, while waiting at a barrier

// The first range of a thread: it leaves half of `count` to be taken by whoever comes.
inline int64_t first_share(int64_t count, int64_t grain, int threads) {
  return std::max(grain, count / (2 * threads) / grain * grain);
}

// A barrier. In decode a waiting thread fetches what it will read next, its part of `panels` panels of `next` from
// `panel` on: waiting costs no bandwidth then.
template <class Last>
void CpuProgram::wait_for_all(int thread, const Packed* next, Last&& last, int64_t panel, int64_t panels) {
  const uint8_t* at = nullptr;
  const uint8_t* end = nullptr;
  if (next && batch_->tokens <= kGemvTokens) {
    if (panels < 0) panels = next->panels;
    const int64_t own = first_share(panels, 1, backend_.team.size()) * thread;  // about: shares differ by op
    const uint8_t* begin = next->data + static_cast<size_t>(panel) * next->panel_bytes;
    at = begin + static_cast<size_t>(std::min(own, panels - 1)) * next->panel_bytes;
    end = std::min<const uint8_t*>(at + kFetchBytes, begin + static_cast<size_t>(panels) * next->panel_bytes);
  }
  const auto fetch = [&] {
    for (int line = 0; line < 4 && at < end; ++line, at += 64) __builtin_prefetch(at, 0, 2);
  };
  backend_.team.barrier(
      [&] {
        counter_.store(0, std::memory_order_relaxed);
        ++barriers_;
        last();
      },
      fetch);
}

// Threads take ranges of [0, count) until none is left or the batch is cancelled: the first is the thread's own, the
// rest go to whoever comes. `halving`: ranges shrink from a part of what is left to `grain`, long streams first and
// then small ones, so that all end together. Results never depend on who took what.
template <class F>
void CpuProgram::share(int64_t count, int64_t grain, int thread, F&& body, bool halving) {
  const int threads = backend_.team.size();
  const int64_t first = halving ? first_share(count, grain, threads) : grain, shared = first * threads;
  int64_t begin = first * thread, end = std::min(begin + first, count);
  while (begin < count) {
    if (cancelled()) return;
    body(begin, end);
    int64_t taken = counter_.load(std::memory_order_relaxed), take;
    do {
      begin = shared + taken;
      if (begin >= count) return;
      take = halving ? first_share(count - begin, grain, threads) : grain;
    } while (!counter_.compare_exchange_weak(taken, taken + take, std::memory_order_relaxed));
    end = std::min(begin + take, count);
  }
}

}  // namespace pe
