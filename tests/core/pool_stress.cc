// The thread pool under stress: every barrier of many runs must order what was written before it, none may hang, and of
// work that is shared between two barriers every piece must be done, once.
//
//   pool_stress [SECONDS [THREADS ...]]     default 2 seconds of each of 1, 2, 3, 7, 16
//
// A child process stops and continues this one all the time. Threads are slow at random, so that the others sleep at
// barriers and between runs; a team is made and ended again and again. Without progress for 300 s the exit status is 2.
// Built from csrc/core alone, so that a sanitizer sees all of it.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "core/thread_pool.h"
#include "core/work_share.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRounds = 40;         // of two barriers, in a run
constexpr int kMostUnits = 600;     // of work shared in a round
constexpr int kStallSeconds = 300;  // of the clock: whoever stops processes here may do so for a while

// splitmix64 (Steele et al. 2014)
uint64_t random_bits(uint64_t& state) {
  uint64_t z = state += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

void delay(uint64_t& state) {
  const uint64_t bits = random_bits(state);
  if (bits % 64 == 0)
    std::this_thread::sleep_for(std::chrono::microseconds(bits >> 8 & 511));
  else if (bits % 8 == 0)
    std::this_thread::yield();
}

void hang(int) {
  static const char text[] = "pool_stress: no progress: a thread sleeps that should have been woken\n";
  static_cast<void>(!write(2, text, sizeof text - 1));
  _exit(2);
}

// Each unit of a random amount of work counts how often it is done, in plain memory: two threads at one are a race. A
// unit in `slow` takes long, so that others take what its thread has left. Where `stop` is not 0, the work ends early.
struct Work {
  int64_t count, grain;
  bool streams;
  uint64_t slow, stop;
  explicit Work(uint64_t seed) {
    uint64_t state = seed;
    count = static_cast<int64_t>(random_bits(state) % (random_bits(state) % 4 == 0 ? kMostUnits : 12));
    grain = static_cast<int64_t>(1 + random_bits(state) % 4);
    streams = random_bits(state) % 2 == 0;
    slow = random_bits(state) % kMostUnits;
    stop = random_bits(state) % 16 == 0 ? 1 + random_bits(state) % 8 : 0;
  }
};

// One run: in each round every thread writes its cell, and after the barrier reads everyone's; the last to arrive adds
// them up. Plain memory: only the barriers order it.
bool one_run(pe::Team& team, pe::WorkShare& share, uint64_t seed, std::vector<uint64_t>& cells) {
  const int threads = team.size();
  uint64_t total = 0;
  std::vector<int> done(kMostUnits);
  std::atomic<int> wrong{0};
  std::vector<uint64_t> states(static_cast<size_t>(threads) * 16);  // a cache line each
  for (int t = 0; t < threads; ++t) states[static_cast<size_t>(t) * 16] = seed + static_cast<uint64_t>(t);
  team.run([&](int thread) {
    uint64_t& state = states[static_cast<size_t>(thread) * 16];
    for (uint64_t round = 1; round <= kRounds; ++round) {
      delay(state);
      cells[static_cast<size_t>(thread) * 16] = seed + round;
      const Work work(seed + round);
      uint64_t calls = 0;
      const auto stop = [&] { return work.stop != 0 && ++calls > work.stop; };
      share.run(work.count, work.grain, thread, work.streams, stop, [&](int64_t begin, int64_t end) {
        wrong += begin % work.grain != 0 || begin >= end || end > work.count;
        for (int64_t i = begin; i < end; ++i) {
          ++done[static_cast<size_t>(i)];
          if (static_cast<uint64_t>(i) == work.slow) std::this_thread::sleep_for(std::chrono::microseconds(300));
        }
      });
      team.barrier([&] {
        for (int64_t i = 0; i < kMostUnits; ++i) {
          int& times = done[static_cast<size_t>(i)];
          wrong += times > 1 || (work.stop == 0 && times != (i < work.count));
          times = 0;
        }
        total = 0;
        for (int t = 0; t < threads; ++t) total += cells[static_cast<size_t>(t) * 16];
      });
      wrong += total != (seed + round) * static_cast<uint64_t>(threads);
      for (int t = 0; t < threads; ++t) wrong += cells[static_cast<size_t>(t) * 16] != seed + round;
      team.barrier();
    }
  });
  return wrong == 0;
}

// Stops and continues the process `parent` until it is gone.
[[noreturn]] void stop_and_continue(pid_t parent) {
  uint64_t state = 1;
  while (kill(parent, SIGSTOP) == 0) {
    usleep(static_cast<useconds_t>(random_bits(state) % 2000));
    kill(parent, SIGCONT);
    usleep(static_cast<useconds_t>(random_bits(state) % 5000));
    if (getppid() != parent) break;
  }
  kill(parent, SIGCONT);
  _exit(0);
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 2.0;
  std::vector<int> sizes;
  for (int i = 2; i < argc; ++i) sizes.push_back(std::atoi(argv[i]));
  if (sizes.empty()) sizes = {1, 2, 3, 7, 16};
  const pid_t parent = getpid(), child = fork();
  if (child == 0) stop_and_continue(parent);
  signal(SIGALRM, hang);
  uint64_t seed = 0;
  for (const int threads : sizes) {
    const auto end = Clock::now() + std::chrono::duration<double>(seconds);
    long runs = 0, teams = 0;
    do {
      pe::Team team(threads);
      pe::WorkShare share(threads);
      std::vector<uint64_t> cells(static_cast<size_t>(threads) * 16);
      ++teams;
      for (int i = 0; i < 20; ++i, ++runs) {
        alarm(kStallSeconds);
        if (!one_run(team, share, seed += 1000, cells)) {
          std::fprintf(stderr, "%d threads, run %ld: let through a barrier too early, or work not done once\n", threads,
                       runs);
          kill(child, SIGKILL);
          return 1;
        }
        if (random_bits(seed) % 4 == 0) usleep(200);  // long enough for the workers to fall asleep
      }
    } while (Clock::now() < end);
    std::printf("%d threads: %ld runs of %d barriers in %ld teams\n", threads, runs, 2 * kRounds + 1, teams);
    std::fflush(stdout);
  }
  alarm(0);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  return 0;
}
