// Probes of the device's limits. Each computes something that can be checked, so that nothing is left out by a
// compiler.
#include "cuda/limits.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "cuda/device.h"

namespace pe::cuda {

namespace {

constexpr int kThreads = 512;
constexpr int kLoads = 8;         // of 16 bytes, under way in a thread
constexpr int kAccumulators = 8;  // independent chains of a thread or warp
constexpr int64_t kStep = int64_t{kThreads} * kLoads * 16;
constexpr int64_t kMaxRead = int64_t{1} << 32, kMaxOps = int64_t{1} << 48;
constexpr int32_t kMaxPasses = 10000;
constexpr int64_t kRounds = 1 << 13;  // of a launch and thread: sums stay far from their ends
constexpr int64_t kMmaOps = 2 * 16 * 8 * 32;

// The sum of all words, by blocks that take kStep bytes in turn; a multiple of kStep bytes.
__global__ void __launch_bounds__(kThreads) read_kernel(const uint4* data, int64_t steps, uint32_t* sums) {
  __shared__ uint32_t parts[kThreads / kWarp];
  wait_for_previous();
  uint32_t sum = 0;
  for (int64_t step = blockIdx.x; step < steps; step += gridDim.x) {
    const uint4* from = data + step * kThreads * kLoads + threadIdx.x;
    uint4 v[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) v[i] = load_once(from + i * kThreads);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) sum += v[i].x + v[i].y + v[i].z + v[i].w;
  }
  for (int step = kWarp / 2; step; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  if (lane_id() == 0) parts[warp_id()] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  sum = 0;
  for (int i = 0; i < kThreads / kWarp; ++i) sum += parts[i];
  sums[blockIdx.x] = sum;
}

// Every product of a round is 1 * 1: each sum is 32 a round.
__global__ void __launch_bounds__(kThreads) int8_kernel(int64_t rounds, uint32_t* wrong) {
  wait_for_previous();
  const uint32_t ones = 0x01010101u;
  const uint32_t a[4] = {ones, ones, ones, ones}, b[2] = {ones, ones};
  int32_t d[kAccumulators][4] = {};
  for (int64_t r = 0; r < rounds; ++r)
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) mma_u8s8(d[i], a, b);
  bool right = true;
  for (int i = 0; i < kAccumulators; ++i)
    for (int j = 0; j < 4; ++j) right = right && d[i][j] == 32 * rounds;
  if (!right) atomicAdd(wrong, 1u);
}

// x = x / 2 + 1, which goes to 2
__global__ void __launch_bounds__(kThreads) f32_kernel(int64_t rounds, float half, uint32_t* wrong) {
  wait_for_previous();
  float x[kAccumulators];
  for (int i = 0; i < kAccumulators; ++i) x[i] = static_cast<float>(i);
  for (int64_t r = 0; r < rounds; ++r)
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) x[i] = fmaf(x[i], half, 1.0f);
  bool right = true;
  for (int i = 0; i < kAccumulators; ++i) right = right && fabsf(x[i] - 2.0f) < 4.0f;  // 3 at most after a round
  if (!right) atomicAdd(wrong, 1u);
}

template <class T>
std::unique_ptr<T, void (*)(T*)> device_array(int64_t n) {
  void* p = nullptr;
  check(cudaMalloc(&p, static_cast<size_t>(n) * sizeof(T)), "memory for a measurement");
  return {static_cast<T*>(p), [](T* q) { cudaFree(q); }};
}

class Event {
 public:
  Event() { check(cudaEventCreate(&event_), "event"); }
  Event(const Event&) = delete;
  ~Event() { cudaEventDestroy(event_); }
  void record(Stream stream) { check(cudaEventRecord(event_, stream), "event"); }
  double seconds_since(const Event& begin) const {
    check(cudaEventSynchronize(event_), "a measurement");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin.event_, event_), "a measurement");
    return std::max(1e-3 * static_cast<double>(ms), 1e-9);
  }

 private:
  cudaEvent_t event_{};
};

struct Device {
  int multiprocessors = 0, cache_bytes = 0;
  Device() {
    int id = 0;
    check(cudaGetDevice(&id), "device");
    check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, id), "device");
    check(cudaDeviceGetAttribute(&cache_bytes, cudaDevAttrL2CacheSize, id), "device");
  }
};

void measure_read(Stream stream, const pe_limit_args& a, const Device& device) {
  const int64_t steps = (a.work + kStep - 1) / kStep, bytes = steps * kStep;
  // what a pass read must have left the cache when the pass after next-but-one comes back to it
  const int64_t buffers = std::max<int64_t>(2, (2 * int64_t{device.cache_bytes} + bytes - 1) / bytes + 1);
  const int blocks = static_cast<int>(std::min<int64_t>(steps, int64_t{device.multiprocessors} * 4));
  const auto data = device_array<uint32_t>(buffers * bytes / 4);
  const auto sums = device_array<uint32_t>(blocks);
  check(cudaMemsetAsync(data.get(), 1, static_cast<size_t>(buffers * bytes), stream), "a measurement");
  std::vector<uint32_t> parts(static_cast<size_t>(blocks));
  Event begin, end;
  for (int32_t pass = 0; pass < a.passes; ++pass) {
    const auto* from = reinterpret_cast<const uint4*>(data.get() + pass % buffers * bytes / 4);
    begin.record(stream);
    launch(stream, read_kernel, static_cast<unsigned>(blocks), kThreads, 0, from, steps, sums.get());
    end.record(stream);
    a.per_second[pass] = static_cast<double>(bytes) / end.seconds_since(begin);
    check(cudaMemcpy(parts.data(), sums.get(), parts.size() * 4, cudaMemcpyDeviceToHost), "a measurement");
    uint32_t sum = 0;
    for (const uint32_t part : parts) sum += part;
    if (sum != static_cast<uint32_t>(bytes / 4) * 0x01010101u)
      fail(PE_INTERNAL, "a probe of reading did not add up what is there");
  }
}

void measure_compute(Stream stream, const pe_limit_args& a, const Device& device) {
  const bool int8 = a.limit == PE_LIMIT_INT8;
  const int blocks = device.multiprocessors * 4;
  const int64_t workers = int64_t{blocks} * (int8 ? kThreads / kWarp : kThreads) * kAccumulators;
  const int64_t round_ops = workers * (int8 ? kMmaOps : 2), rounds = (a.work + round_ops - 1) / round_ops;
  const auto wrong = device_array<uint32_t>(1);
  check(cudaMemset(wrong.get(), 0, sizeof(uint32_t)), "a measurement");
  Event begin, end;
  for (int32_t pass = 0; pass < a.passes; ++pass) {
    begin.record(stream);
    for (int64_t left = rounds; left > 0; left -= kRounds) {
      const int64_t now = std::min(left, kRounds);
      if (int8)
        launch(stream, int8_kernel, static_cast<unsigned>(blocks), kThreads, 0, now, wrong.get());
      else
        launch(stream, f32_kernel, static_cast<unsigned>(blocks), kThreads, 0, now, 0.5f, wrong.get());
    }
    end.record(stream);
    a.per_second[pass] = static_cast<double>(rounds) * static_cast<double>(round_ops) / end.seconds_since(begin);
  }
  uint32_t count = 0;
  check(cudaMemcpy(&count, wrong.get(), sizeof count, cudaMemcpyDeviceToHost), "a measurement");
  if (count) fail(PE_INTERNAL, "a probe of limit %d did not compute what it should", a.limit);
}

}  // namespace

void measure_limit(Stream stream, const pe_limit_args& a) {
  if (a.limit < 0 || a.limit >= PE_LIMIT_COUNT) fail(PE_REQUEST, "limit %d is unknown", a.limit);
  if (a.limit == PE_LIMIT_HOP) fail(PE_UNSUPPORTED, "limit %d is one between threads of a CPU", a.limit);
  const int64_t most = a.limit == PE_LIMIT_READ ? kMaxRead : kMaxOps;
  if (a.work < 1 || a.work > most || a.passes < 1 || a.passes > kMaxPasses)
    fail(PE_REQUEST, "work %lld in %d passes; expected 1 to %lld in 1 to %d", static_cast<long long>(a.work), a.passes,
         static_cast<long long>(most), kMaxPasses);
  const Device device;
  if (a.limit == PE_LIMIT_READ)
    measure_read(stream, a, device);
  else
    measure_compute(stream, a, device);
}

}  // namespace pe::cuda
