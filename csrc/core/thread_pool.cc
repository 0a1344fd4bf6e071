#include "core/thread_pool.h"

#include <unistd.h>

#include <system_error>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/status.h"

namespace pe {

namespace {

// Denormals become zero while alive (a GEMV on denormal scales ran 5 times slower without); the old mode comes back.
class FlushDenormals {
 public:
#if defined(__x86_64__)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FlushDenormals() {
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(saved_));
    __asm__ __volatile__("msr fpcr, %0" : : "r"(saved_ | (uint64_t{1} << 24)));
  }
  ~FlushDenormals() { __asm__ __volatile__("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
  FlushDenormals() {}
#endif
};

}  // namespace

void Gate::open() {
  value_.fetch_add(1, std::memory_order_seq_cst);
  value_.notify_all();
}

void Gate::relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

void Gate::sleep(uint32_t seen) const { value_.wait(seen, std::memory_order_acquire); }

Team::Team(int threads) : Team(threads, threads > static_cast<int>(std::thread::hardware_concurrency())) {}

Team::Team(int threads, bool crowded)
    : process_(getpid()), workers_(std::make_unique<std::vector<std::thread>>()), start_(crowded), barrier_(crowded) {
  try {
    workers_->reserve(static_cast<size_t>(threads - 1));
    for (int t = 1; t < threads; ++t) workers_->emplace_back([this, t] { work(t); });
  } catch (const std::system_error& e) {
    const int made = size();
    end();
    fail(PE_RESOURCE, "cannot start thread %d of %d: %s", made, threads, e.what());
  } catch (...) {
    end();
    throw;
  }
}

Team::~Team() { end(); }

void Team::end() {
  if (getpid() != process_) {
    // A fork's copy: the threads are not in this process, and joining or detaching them would be undefined.
    static_cast<void>(workers_.release());
    return;
  }
  stop_ = true;
  start_.open();
  for (auto& w : *workers_) w.join();
}

void Team::run(const std::function<void(int)>& body) {
  if (size() > 1 && getpid() != process_)
    fail(PE_RESOURCE,
         "process %d was forked from %d, whose %d threads it lacks; expected a backend made in this process",
         static_cast<int>(getpid()), static_cast<int>(process_), size() - 1);
  FlushDenormals flush;
  body_ = &body;
  if (size() > 1) start_.open();
  body(0);
  barrier();  // nobody reads body_ any more
}

void Team::work(int thread) {
  FlushDenormals flush;
  for (uint32_t seen = 0;;) {
    start_.wait(seen);
    ++seen;  // one run at a time: the next cannot start before this one's last barrier
    if (stop_) return;
    (*body_)(thread);
    barrier();
  }
}

}  // namespace pe
