// A team of threads that executes one function together, with barriers inside it.
//
// The caller is thread 0. Workers wait a moment in a loop, then sleep, both between runs and at barriers: pure spinning
// collapses when there are more threads than cores, pure sleeping costs a wake-up per barrier.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace pe {

// A counter that waiters watch; each on its own cache line. crowded: more threads than CPUs, so a waiter lets the
// others run instead of looping (8 threads on 2 CPUs decoded at a tenth of the speed of 2 without).
//
// No wake-up is lost. open() adds to the value and then asks whether anyone sleeps; a sleeper says so and then compares
// the value, all in one order (seq_cst), so one of the two sees the other. The kernel compares once more, under the
// lock that a waker takes, before it puts a thread to sleep. A signal, SIGSTOP and SIGCONT among them, ends a sleep
// early, and the value is compared again. Waiters ask for "differs", so it does not matter how late they look: the
// value can only come round to `seen` after 2^32 openings, and those of a team wait for every thread.
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

// One run at a time, by one thread at a time. Why one counter is enough for the barriers: a thread reads barrier_
// before it arrives, and the gate cannot open before it has arrived, so `seen` is this barrier's value; the last to
// arrive sets arrived_ back before it opens, and opening (release) and seeing it (acquire) order that before the next
// arrival. A run begins after the last barrier of the one before, so start_ is at most one ahead of any worker's
// `seen`; what the caller wrote (body_, stop_) is ordered by start_, what the workers wrote by the last barrier.
class Team {
 public:
  explicit Team(int threads);  // throws Error(PE_RESOURCE)
  ~Team();
  int size() const { return static_cast<int>(workers_->size()) + 1; }

  // Calls body(thread) on every thread, denormals flushed to zero, and returns when all have ended. body does not
  // throw. Throws Error(PE_RESOURCE) in a process forked from the one that made the team, where there are no workers.
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
  void end();

  const pid_t process_;
  std::unique_ptr<std::vector<std::thread>> workers_;
  const std::function<void(int)>* body_ = nullptr;
  bool stop_ = false;
  Gate start_, barrier_;
  alignas(64) std::atomic<int> arrived_{0};
};

}  // namespace pe
