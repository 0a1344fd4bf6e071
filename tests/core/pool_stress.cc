// The thread pool under stress: every barrier of many runs must order what was written before it, and none may hang.
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

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRounds = 40;         // barriers in a run
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

// One run: in each round every thread writes its cell, and after the barrier reads everyone's; the last to arrive adds
// them up. Plain memory: only the barriers order it.
bool one_run(pe::Team& team, uint64_t seed, std::vector<uint64_t>& cells) {
  const int threads = team.size();
  uint64_t total = 0;
  std::atomic<int> wrong{0};
  std::vector<uint64_t> states(static_cast<size_t>(threads) * 16);  // a cache line each
  for (int t = 0; t < threads; ++t) states[static_cast<size_t>(t) * 16] = seed + static_cast<uint64_t>(t);
  team.run([&](int thread) {
    uint64_t& state = states[static_cast<size_t>(thread) * 16];
    for (uint64_t round = 1; round <= kRounds; ++round) {
      delay(state);
      cells[static_cast<size_t>(thread) * 16] = seed + round;
      team.barrier([&] {
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
      std::vector<uint64_t> cells(static_cast<size_t>(threads) * 16);
      ++teams;
      for (int i = 0; i < 20; ++i, ++runs) {
        alarm(kStallSeconds);
        if (!one_run(team, seed += 1000, cells)) {
          std::fprintf(stderr, "%d threads, run %ld: a barrier let somebody through too early\n", threads, runs);
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
