// Choosing tokens on the device: greedy, or temperature and top-k, with log probabilities; runtime/sampler.cc is the
// rule.
//
// A row is cut into chunks of 1024 logits, a block each: its largest logit, its sum of exp, whether all is finite, and,
// where top-k is wanted, its 64 largest, sorted. Lists are then sorted by 16 at a time until one is left. A logit and
// its id are one 64-bit key, larger for a larger logit and then for a lower id, so all of it is exact and has one
// order. The last block draws with doubles as the CPU does: the ids are the same but where exp of a double differs in
// its last bit and the random number falls between the two.
#include <utility>

#include "cuda/device.h"
#include "cuda/math.cuh"

namespace pe::cuda {

namespace {

using Key = unsigned long long;

constexpr int kThreads = 256;
constexpr int kChunk = 1024;  // logits of a block
constexpr int kPerThread = kChunk / kThreads;
constexpr int kKept = kMaxDeviceTopK;

struct Part {  // of a chunk
  Key best;
  float sum;  // of exp(x - best)
  int32_t finite;
};

__host__ __device__ constexpr int64_t chunks_of(int64_t n) { return (n + kChunk - 1) / kChunk; }

__device__ __forceinline__ Key key_of(float x, uint32_t id) {
  const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 counts as 0
  const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<Key>(ordered) << 32 | (0xffffffffu - id);
}
__device__ __forceinline__ float logit_of(Key key) {
  const auto ordered = static_cast<uint32_t>(key >> 32);
  return __uint_as_float(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}
__device__ __forceinline__ int32_t id_of(Key key) {
  return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(key));
}

__device__ __forceinline__ Key warp_best(Key key) {
  for (int step = kWarp / 2; step; step /= 2) {
    const Key other = __shfl_xor_sync(kAllLanes, key, step);
    key = other > key ? other : key;
  }
  return key;
}

// The block's keys, largest first (a bitonic network, Batcher 1968).
__device__ void sort_keys(Key* keys) {
  for (int size = 2; size <= kChunk; size *= 2)
    for (int stride = size / 2; stride; stride /= 2) {
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < kChunk / 2; i += kThreads) {
        const int low = i / stride * 2 * stride + i % stride, high = low + stride;
        const Key a = keys[low], b = keys[high];
        if ((a < b) == ((low & size) == 0)) {
          keys[low] = b;
          keys[high] = a;
        }
      }
    }
  __syncthreads();
}

struct Chunks {
  const float* logits;
  int64_t stride, n;
  const SampleRow* params;
  Part* parts;  // [rows][chunks]
  Key* kept;    // [rows][chunks][kKept]
};

__global__ void __launch_bounds__(kThreads) chunk_kernel(Chunks a) {
  __shared__ Key keys[kChunk];
  __shared__ Key best_of_warp[kThreads / kWarp];
  wait_for_previous();
  let_next_start();
  const int64_t row = blockIdx.y, chunk = blockIdx.x, part = row * gridDim.x + chunk;
  const float* logits = a.logits + row * a.stride;
  float x[kPerThread];
  Key best = 0;
  bool finite = true;
  for (int i = 0; i < kPerThread; ++i) {
    const int at = i * kThreads + static_cast<int>(threadIdx.x);
    const int64_t id = chunk * kChunk + at;
    x[i] = id < a.n ? logits[id] : -__int_as_float(0x7f800000);
    const Key key = id < a.n ? key_of(x[i], static_cast<uint32_t>(id)) : 0;
    finite = finite && (id >= a.n || fabsf(x[i]) < __int_as_float(0x7f800000));
    keys[at] = key;
    best = key > best ? key : best;
  }
  best = warp_best(best);
  if (lane_id() == 0) best_of_warp[warp_id()] = best;
  finite = __syncthreads_and(finite);
  best = warp_best(lane_id() < kThreads / kWarp ? best_of_warp[lane_id()] : 0);
  float sum = 0.0f;
  for (int i = 0; i < kPerThread; ++i) sum += exp_of(x[i] - logit_of(best));
  sum = block_sum(sum);
  if (threadIdx.x == 0) a.parts[part] = {best, sum, finite};
  if (!(a.params[row].temperature > 0.0f)) return;
  sort_keys(keys);
  if (threadIdx.x < kKept) a.kept[part * kKept + threadIdx.x] = keys[threadIdx.x];
}

// Lists of kKept, 16 of them a block, to one.
__global__ void __launch_bounds__(kThreads)
    merge_kernel(const SampleRow* params, const Key* lists, int64_t count, Key* merged) {
  __shared__ Key keys[kChunk];
  wait_for_previous();
  let_next_start();
  const int64_t row = blockIdx.y, block = blockIdx.x;
  if (!(params[row].temperature > 0.0f)) return;
  for (int i = static_cast<int>(threadIdx.x); i < kChunk; i += kThreads) {
    const int64_t at = block * kChunk + i;
    keys[i] = at < count * kKept ? lists[row * count * kKept + at] : 0;
  }
  sort_keys(keys);
  if (threadIdx.x < kKept) merged[(row * gridDim.x + block) * kKept + threadIdx.x] = keys[threadIdx.x];
}

// Philox4x32-10 (Salmon et al. 2011): counter (step, 0), key seed -> a double in [0, 1).
__device__ double uniform(uint64_t seed, uint64_t step) {
  uint32_t c[4] = {static_cast<uint32_t>(step), static_cast<uint32_t>(step >> 32), 0, 0};
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t x = uint64_t{0xD2511F53u} * c[0], y = uint64_t{0xCD9E8D57u} * c[2];
    c[0] = static_cast<uint32_t>(y >> 32) ^ c[1] ^ k0;
    c[1] = static_cast<uint32_t>(y);
    c[2] = static_cast<uint32_t>(x >> 32) ^ c[3] ^ k1;
    c[3] = static_cast<uint32_t>(x);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const uint64_t bits = (uint64_t{c[0]} << 32 | c[1]) >> 11;
  return static_cast<double>(bits) * 0x1.0p-53;
}

struct Finish {
  const float* logits;
  int64_t stride, n, chunks;
  const SampleRow* params;
  const Part* parts;
  const Key* kept;  // [rows][kKept]
  SampleOut* out;
};

// A warp a row: the parts of its chunks, then the draw among the top_k largest (all, by id, where top_k is not less
// than their number).
__global__ void __launch_bounds__(kWarp) finish_kernel(Finish a) {
  __shared__ double weights[kKept];
  wait_for_previous();
  let_next_start();
  const int64_t row = blockIdx.x;
  const int lane = lane_id();
  const SampleRow p = a.params[row];
  const Part* parts = a.parts + row * a.chunks;
  Key best = 0;
  bool finite = true;
  for (int64_t c = lane; c < a.chunks; c += kWarp) {
    best = parts[c].best > best ? parts[c].best : best;
    finite = finite && parts[c].finite;
  }
  best = warp_best(best);
  finite = __all_sync(kAllLanes, finite);
  const auto top = static_cast<double>(logit_of(best));
  double total = 0.0;
  for (int64_t c = lane; c < a.chunks; c += kWarp)
    total += static_cast<double>(parts[c].sum) * exp(static_cast<double>(logit_of(parts[c].best)) - top);
  for (int step = kWarp / 2; step; step /= 2) total += __shfl_xor_sync(kAllLanes, total, step);

  const float* logits = a.logits + row * a.stride;
  int32_t id = id_of(best);
  if (p.temperature > 0.0f && finite) {
    const double inverse = 1.0 / static_cast<double>(p.temperature);
    const bool all = p.top_k >= a.n;
    const int count = all ? static_cast<int>(a.n) : p.top_k;
    const auto candidate = [&](int i) { return all ? i : id_of(a.kept[row * kKept + i]); };
    for (int i = lane; i < count; i += kWarp)
      weights[i] = exp((static_cast<double>(logits[candidate(i)]) - top) * inverse);
    __syncwarp();
    double left = 0.0;
    for (int i = 0; i < count; ++i) left += weights[i];
    left *= uniform(p.seed, p.step);
    int chosen = 0;
    for (int i = 0; i < count; ++i) {
      if (weights[i] <= 0.0) continue;
      chosen = i;
      if (left < weights[i]) break;
      left -= weights[i];
    }
    id = candidate(chosen);
  }
  if (lane != 0) return;
  const double log_sum = log(total);
  const auto logprob = [&](int32_t i) { return static_cast<float>(static_cast<double>(logits[i]) - top - log_sum); };
  a.out[row] = {id, finite ? logprob(id) : 0.0f, finite && p.target >= 0 ? logprob(p.target) : 0.0f, finite};
}

__global__ void __launch_bounds__(kThreads) softcap_kernel(Rows logits, float cap) {
  wait_for_previous();
  let_next_start();
  const int64_t c = static_cast<int64_t>(blockIdx.y) * kThreads + static_cast<int64_t>(threadIdx.x);
  if (c >= logits.width) return;
  float& x = logits.f[static_cast<int64_t>(blockIdx.x) * logits.stride + c];
  x = tanh_of(x * (1.0f / cap)) * cap;
}

dim3 grid_of(int64_t blocks, int rows) { return dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(rows)); }

}  // namespace

void softcap(Stream stream, const Rows& logits, float cap, int rows) {
  const auto blocks = static_cast<unsigned>((logits.width + kThreads - 1) / kThreads);
  if (rows > 0) launch(stream, softcap_kernel, dim3(static_cast<unsigned>(rows), blocks), kThreads, 0, logits, cap);
}

size_t sample_scratch_bytes(int rows, int64_t vocab) {
  const int64_t chunks = chunks_of(vocab), merged = chunks_of(chunks * kKept);
  return static_cast<size_t>(rows) *
         (static_cast<size_t>(chunks) * sizeof(Part) + static_cast<size_t>(chunks + merged) * kKept * sizeof(Key));
}

void sample(Stream stream, const Rows& logits, const SampleRow* params, SampleOut* out, void* scratch, int rows) {
  if (rows <= 0) return;
  const int64_t n = logits.width, chunks = chunks_of(n);
  auto* parts = static_cast<Part*>(scratch);
  auto* kept = reinterpret_cast<Key*>(parts + rows * chunks);
  auto* other = kept + rows * chunks * kKept;
  launch(stream, chunk_kernel, grid_of(chunks, rows), kThreads, 0,
         Chunks{logits.f, logits.stride, n, params, parts, kept});
  for (int64_t lists = chunks; lists > 1;) {
    const int64_t blocks = chunks_of(lists * kKept);
    launch(stream, merge_kernel, grid_of(blocks, rows), kThreads, 0, params, kept, lists, other);
    std::swap(kept, other);
    lists = blocks;
  }
  launch(stream, finish_kernel, static_cast<unsigned>(rows), kWarp, 0,
         Finish{logits.f, logits.stride, n, chunks, params, parts, kept, out});
}

}  // namespace pe::cuda
