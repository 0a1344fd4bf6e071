// Measuring the machine: the team reads a buffer, or computes in registers, pass by pass between barriers.
#include <algorithm>

#include "core/status.h"
#include "runtime/cpu_backend.h"
#include "runtime/program.h"

using namespace pe;

namespace {

constexpr int64_t kMaxRead = int64_t{1} << 32, kMaxOps = int64_t{1} << 48;
constexpr int32_t kMaxPasses = 10000;
constexpr int kSpins = 2000;  // in front of a line that another thread has; then that thread may need this CPU

// Runs body(thread, pass) `passes` times on all threads at once, after ready(thread, pass); per_second[i] = work /
// seconds of pass i. A thread that slept at the barrier takes longer to wake than a pass may take: the start is waited
// for awake.
template <class Ready, class F>
void time_passes(Team& team, const pe_limit_args& a, double work, Ready&& ready, F&& body) {
  uint64_t begin = 0;
  std::atomic<int64_t> awake{0}, started{0};
  team.run([&](int thread) {
    for (int64_t i = 0; i < a.passes; ++i) {
      ready(thread, i);
      team.barrier();
      if (awake.fetch_add(1) == team.size() * (i + 1) - 1) {
        begin = now_ns();
        started = i + 1;
      } else {
        while (started != i + 1) std::this_thread::yield();
      }
      body(thread, i);
      team.barrier(
          [&] { a.per_second[i] = work * 1e9 / static_cast<double>(std::max<uint64_t>(now_ns() - begin, 1)); });
    }
  });
}

}  // namespace

void CpuBackend::measure(const pe_limit_args& a) {
  if (a.limit < 0 || a.limit >= PE_LIMIT_COUNT) fail(PE_REQUEST, "limit %d is unknown", a.limit);
  const bool compute = a.limit == PE_LIMIT_INT8 || a.limit == PE_LIMIT_F32;
  const int64_t most = compute ? kMaxOps : kMaxRead;
  if (a.work < 1 || a.work > most || a.passes < 1 || a.passes > kMaxPasses)
    fail(PE_REQUEST, "work %lld in %d passes; expected 1 to %lld in 1 to %d", static_cast<long long>(a.work), a.passes,
         static_cast<long long>(most), kMaxPasses);
  const int64_t threads = team.size();
  const auto units = [&](int64_t unit) { return (a.work + threads * unit - 1) / (threads * unit); };  // per thread
  std::atomic<bool> wrong{false};
  if (a.limit == PE_LIMIT_READ) {
    const int64_t bytes = units(kProbeRead) * kProbeRead;
    Memory buffer(static_cast<size_t>(bytes * threads));
    const auto part = [&](int thread) { return buffer.data() + bytes * thread; };
    const auto ready = [&](int thread, int64_t pass) {
      int32_t* p = reinterpret_cast<int32_t*>(part(thread));
      if (pass == 0) std::fill(p, p + bytes / 4, 1);
      flush_caches(part(thread), static_cast<size_t>(bytes));
    };
    time_passes(team, a, static_cast<double>(bytes * threads), ready, [&](int thread, int64_t pass) {
      // the best pass counts, and processors differ in whether software prefetch helps
      if (kernels.probe_read(part(thread), bytes, pass % 2 != 0) != bytes / 4) wrong = true;
    });
  } else if (a.limit == PE_LIMIT_HOP) {
    if (threads < 2) fail(PE_UNSUPPORTED, "a line goes from thread to thread; this backend has one");
    struct alignas(2 * kAlign) {  // no neighbour in the pair of lines that may be fetched together
      std::atomic<int64_t> turn{0};
    } line;
    const int64_t rounds = units(1);
    const auto ready = [](int, int64_t) {};
    time_passes(team, a, static_cast<double>(rounds * threads), ready, [&](int thread, int64_t pass) {
      for (int64_t r = 0; r < rounds; ++r) {
        const int64_t mine = (pass * rounds + r) * threads + thread;
        for (int spins = 0; line.turn.load(std::memory_order_acquire) != mine; ++spins)
          if (spins > kSpins) std::this_thread::yield();
        line.turn.store(mine + 1, std::memory_order_release);
      }
    });
  } else {
    const bool int8 = a.limit == PE_LIMIT_INT8;
    const int64_t round_ops = int64_t{kProbeSteps} * (int8 ? 64 : kPanel) * 2, rounds = units(round_ops);
    const auto ready = [](int, int64_t) {};
    time_passes(team, a, static_cast<double>(rounds * round_ops * threads), ready, [&](int, int64_t) {
      for (int64_t left = rounds; left > 0; left -= kProbeRounds) {
        const int64_t now = std::min<int64_t>(left, kProbeRounds);
        if (int8 ? kernels.probe_int8(now) == 0 : !(kernels.probe_f32(now) >= 1.0f)) wrong = true;
      }
    });
  }
  if (wrong) fail(PE_INTERNAL, "a probe of limit %d did not compute what it should", a.limit);
}
