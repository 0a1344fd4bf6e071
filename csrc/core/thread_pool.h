// A team of threads that executes one function together, with barriers inside it.
//
// The caller is thread 0. Workers wait a moment in a loop, then sleep, both between runs and at barriers: pure spinning
// collapses when there are more threads than cores, pure sleeping costs a wake-up per barrier.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace pe {

// A counter that waiters watch; each on its own cache line. crowded: more threads than CPUs, so a waiter lets the
// others run instead of looping (8 threads on 2 CPUs decoded at a tenth of the speed of 2 without).
class Gate {
 public:
  explicit Gate(bool crowded) : crowded_(crowded) {}
  uint32_t value() const { return value_.load(std::memory_order_acquire); }
  void open();  // adds one and wakes the waiters
  // Until the value differs from `seen`. `idle` runs again and again while the wait is a loop.
  template <class Idle>
  void wait(uint32_t seen, Idle&& idle) const {
    for (int i = 0; i < kSpins; ++i) {
      if (value() != seen) return;
      if (crowded_) {
        std::this_thread::yield();
      } else {
        idle();
        relax();
      }
    }
    sleep(seen);
  }
  void wait(uint32_t seen) const {
    wait(seen, [] {});
  }

 private:
  static constexpr int kSpins = 2000;  // 25 to 90 us, as pause takes 40 to 140 cycles
  static void relax();
  void sleep(uint32_t seen) const;

  alignas(64) std::atomic<uint32_t> value_{0};
  const bool crowded_;
};

class Team {
 public:
  explicit Team(int threads);  // throws Error(PE_RESOURCE)
  ~Team();
  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(thread) on every thread, denormals flushed to zero, and returns when all have ended.
  void run(const std::function<void(int)>& body);

  // Inside run: all threads meet. `last` runs on the last to arrive, before the others go on; `idle` on those that
  // wait.
  template <class Last, class Idle>
  void barrier(Last&& last, Idle&& idle) {
    if (size() == 1) {
      last();
      return;
    }
    const uint32_t seen = barrier_.value();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size() - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      last();
      barrier_.open();
    } else {
      barrier_.wait(seen, idle);
    }
  }
  template <class Last>
  void barrier(Last&& last) {
    barrier(last, [] {});
  }
  void barrier() {
    barrier([] {});
  }

 private:
  Team(int threads, bool crowded);
  void work(int thread);

  std::vector<std::thread> workers_;
  const std::function<void(int)>* body_ = nullptr;
  bool stop_ = false;
  Gate start_, barrier_;
  alignas(64) std::atomic<int> arrived_{0};
};

}  // namespace pe
