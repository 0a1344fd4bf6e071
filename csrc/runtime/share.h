// How the threads inside a run share work and meet: the templates of CpuProgram that its ops use.
#pragma once

#include <algorithm>

#include "runtime/cpu_program.h"

namespace pe {

constexpr int64_t kFetchBytes = 64 << 10;  // of the next weights, while waiting at a barrier

// A barrier. In decode a waiting thread fetches what it will read next, the beginning of its part of `panels` panels of
// `next` from `panel` on: waiting costs no bandwidth then.
template <class Last>
void CpuProgram::wait_for_all(int thread, const Packed* next, Last&& last, int64_t panel, int64_t panels) {
  const uint8_t* at = nullptr;
  const uint8_t* end = nullptr;
  if (next && batch_->tokens <= kGemvTokens) {
    if (panels < 0) panels = next->panels;
    const int64_t own = panels * thread / backend_.team.size();  // about: parts differ by op
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

// Threads take ranges of [0, count) until none is left or the batch is cancelled. Results never depend on who took
// what.
template <class F>
void CpuProgram::share(int64_t count, int64_t grain, int thread, F&& body, bool streams) {
  work_.run(count, grain, thread, streams, [this] { return cancelled(); }, body);
}

}  // namespace pe
