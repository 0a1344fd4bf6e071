// The router of a mixture of experts: scores, each token's experts, and the rows sorted by expert. Semantics and order
// of sums: cpu/kernels/router-inl.h and Program::finish_routing; for equal logits the weights have the CPU's bits.
#include "cuda/device.h"
#include "cuda/math.cuh"

namespace pe::cuda {

namespace {

constexpr int kSortThreads = 256;
constexpr size_t kMostBytes = 48 * 1024, kFewBytes = 40 * 1024;  // of shared memory: choose_many, route_few

__device__ __forceinline__ float minus_infinity() { return __int_as_float(static_cast<int>(0xff800000u)); }

struct Choice {
  float* scores;  // [T][stride]: logits
  int64_t stride;
  float* out;  // [T][out_stride]: top_k weights, top_k ids
  int64_t out_stride;
  const float* bias;
  int32_t experts, top_k, groups, top_groups, scoring, group_score, normalise;
  float scale, eps;
};

// Of a warp, in shared memory: three floats an expert.
struct Work {
  float *scores, *choice, *groups;
};
__device__ __forceinline__ Work work_of(int warp, int experts) {
  float* base = reinterpret_cast<float*>(shared_memory()) + static_cast<int64_t>(warp) * 3 * experts;
  return {base, base + experts, base + 2 * experts};
}

// Scores from logits; false where one is NaN or infinite. A softmax's sum is 16 partial sums and a fixed tree.
__device__ bool score_experts(const Choice& a, const float* logits, float* scores) {
  const int lane = lane_id();
  float max = minus_infinity();
  bool finite = true;
  for (int i = lane; i < a.experts; i += kWarp) {
    max = fmaxf(max, logits[i]);
    finite = finite && fabsf(logits[i]) < __int_as_float(0x7f800000);
  }
  if (!__all_sync(kAllLanes, finite)) return false;
  max = warp_max(max);
  for (int i = lane; i < a.experts; i += kWarp)
    scores[i] = a.scoring == PE_SOFTMAX ? exp_of(logits[i] - max) : sigmoid(logits[i]);
  __syncwarp();
  if (a.scoring != PE_SOFTMAX) return true;
  float total = 0.0f;
  for (int i = lane % kPanel; i < a.experts; i += kPanel) total += scores[i];
  for (int step = kPanel / 2; step; step /= 2) total += __shfl_xor_sync(kAllLanes, total, step);
  __syncwarp();
  for (int i = lane; i < a.experts; i += kWarp) scores[i] /= total;
  return true;
}

// A group's best score, or the sum of its best two.
__device__ float score_group(const float* x, int n, int kind) {
  float first = x[0], second = minus_infinity();
  for (int i = 1; i < n; ++i) {
    if (x[i] > first) {
      second = first;
      first = x[i];
    } else if (x[i] > second) {
      second = x[i];
    }
  }
  return kind == PE_GROUP_MAX ? first : first + second;
}

// Leaves the choice to the top_groups best groups, the lower ones where several are equal.
__device__ void keep_groups(const Choice& a, const Work& w) {
  const int size = a.experts / a.groups;
  for (int g = lane_id(); g < a.groups; g += kWarp) w.groups[g] = score_group(w.choice + g * size, size, a.group_score);
  __syncwarp();
  for (int g = lane_id(); g < a.groups; g += kWarp) {
    int better = 0;
    for (int other = 0; other < a.groups; ++other)
      better += w.groups[other] > w.groups[g] || (w.groups[other] == w.groups[g] && other < g);
    for (int i = 0; better >= a.top_groups && i < size; ++i) w.choice[g * size + i] = minus_infinity();
  }
  __syncwarp();
}

// The expert chosen next, the lowest where several are equal; it is then out of the choice.
__device__ int take_best(float* choice, int experts) {
  const int lane = lane_id();
  float most = lane < experts ? choice[lane] : minus_infinity();
  int best = lane;
  for (int i = lane + kWarp; i < experts; i += kWarp)
    if (choice[i] > most) {
      most = choice[i];
      best = i;
    }
  for (int step = kWarp / 2; step; step /= 2) {
    const float value = __shfl_xor_sync(kAllLanes, most, step);
    const int at = __shfl_xor_sync(kAllLanes, best, step);
    if (value > most || (value == most && at < best)) {
      most = value;
      best = at;
    }
  }
  if (lane == best % kWarp) choice[best] = minus_infinity();
  __syncwarp();
  return best;
}

// A warp: weights and ids of a token's experts, best first. NaN or Inf among the logits: NaN weights, the first ids.
__device__ void choose_experts(const Choice& a, int64_t token, const Work& w) {
  const int lane = lane_id();
  float* out = a.out + token * a.out_stride;
  if (!score_experts(a, a.scores + token * a.stride, w.scores)) {
    for (int s = lane; s < a.top_k; s += kWarp) {
      out[s] = __int_as_float(0x7fc00000);
      out[a.top_k + s] = static_cast<float>(s);
    }
    return;
  }
  for (int i = lane; i < a.experts; i += kWarp) w.choice[i] = a.bias ? w.scores[i] + a.bias[i] : w.scores[i];
  __syncwarp();
  if (a.top_groups < a.groups) keep_groups(a, w);
  float sum = 0.0f;
  for (int s = 0; s < a.top_k; ++s) {
    const int best = take_best(w.choice, a.experts);
    sum += w.scores[best];
    if (lane == s % kWarp) out[a.top_k + s] = static_cast<float>(best);
  }
  for (int s = lane; s < a.top_k; s += kWarp) {
    const float score = w.scores[static_cast<int>(out[a.top_k + s])];
    out[s] = (a.normalise ? score / (sum + a.eps) : score) * a.scale;
  }
}

// ---- sorting --------------------------------------------------------------------------------------------------------

struct Sort {
  Routing to;
  Failure* failure;
  int32_t layer, tokens;
  __device__ int expert(int token, int slot) const {
    return static_cast<int>(to.weights_ids.f[token * to.weights_ids.stride + to.top_k + slot]);
  }
  __device__ int expert(int row) const { return expert(row / to.top_k, row % to.top_k); }
  __device__ void put(int row, int at) const {
    to.order[at] = row;
    to.place[row] = at;
  }
  __device__ void finish(int e, int first, int count) const {
    to.first_row[e] = first;
    if (e + 1 == to.experts) to.first_row[e + 1] = first + count;
    to.counts[e] += static_cast<uint64_t>(count);
  }
};

// The block: the first token whose weights are NaN, if any, is the run's failure unless it has one.
__device__ void report_failure(const Sort& a) {
  __shared__ int first;
  if (threadIdx.x == 0) first = a.tokens;
  __syncthreads();
  for (int t = static_cast<int>(threadIdx.x); t < a.tokens; t += static_cast<int>(blockDim.x)) {
    const float weight = a.to.weights_ids.f[t * a.to.weights_ids.stride];
    if (weight != weight) atomicMin(&first, t);
  }
  __syncthreads();
  if (threadIdx.x != 0 || first == a.tokens || atomicCAS(&a.failure->status, PE_OK, PE_COMPUTE) != PE_OK) return;
  a.failure->layer = a.layer;
  a.failure->token = first;
}

// Few tokens: one block, a warp a token; then a thread an expert, which looks at every row.
__global__ void __launch_bounds__(kSortThreads) route_few(Choice choice, Sort sort) {
  wait_for_previous();
  let_next_start();
  if (warp_id() < sort.tokens) choose_experts(choice, warp_id(), work_of(warp_id(), choice.experts));
  __syncthreads();
  report_failure(sort);
  for (int e = static_cast<int>(threadIdx.x); e < sort.to.experts; e += kSortThreads) {
    int first = 0, count = 0;
    for (int t = 0; t < sort.tokens; ++t)
      for (int s = 0; s < sort.to.top_k; ++s) {
        const int expert = sort.expert(t, s);
        first += expert < e;
        count += expert == e;
      }
    sort.finish(e, first, count);
    for (int t = 0, at = first; t < sort.tokens && at < first + count; ++t)
      for (int s = 0; s < sort.to.top_k; ++s)
        if (sort.expert(t, s) == e) sort.put(t * sort.to.top_k + s, at++);
  }
}

__global__ void __launch_bounds__(kWarp) choose_many(Choice choice) {
  wait_for_previous();
  let_next_start();
  choose_experts(choice, blockIdx.x, work_of(0, choice.experts));
}

// A block an expert: each warp counts in a part of the rows, then places its own behind those of the parts before it.
__global__ void __launch_bounds__(kSortThreads) sort_many(Sort a) {
  __shared__ int less[kSortThreads / kWarp], equal[kSortThreads / kWarp];
  wait_for_previous();
  let_next_start();
  constexpr int kWarps = kSortThreads / kWarp;
  const int e = static_cast<int>(blockIdx.x), rows = a.tokens * a.to.top_k, lane = lane_id(), warp = warp_id();
  const int part = (rows + kSortThreads - 1) / kSortThreads * kWarp;  // rows of a warp
  const int begin = warp * part, end = begin + part < rows ? begin + part : rows;
  int smaller = 0, same = 0;
  for (int row = begin + lane; row < end; row += kWarp) {
    const int expert = a.expert(row);
    smaller += expert < e;
    same += expert == e;
  }
  for (int step = kWarp / 2; step; step /= 2) {
    smaller += __shfl_xor_sync(kAllLanes, smaller, step);
    same += __shfl_xor_sync(kAllLanes, same, step);
  }
  if (lane == 0) {
    less[warp] = smaller;
    equal[warp] = same;
  }
  __syncthreads();
  int first = 0, count = 0, before = 0;
  for (int w = 0; w < kWarps; ++w) {
    first += less[w];
    count += equal[w];
    before += w < warp ? equal[w] : 0;
  }
  if (threadIdx.x == 0) a.finish(e, first, count);
  if (e == 0) report_failure(a);
  int at = first + before;
  for (int base = begin; base < end; base += kWarp) {
    const int row = base + lane;
    const bool mine = row < end && a.expert(row) == e;
    const unsigned all = __ballot_sync(kAllLanes, mine);
    if (mine) a.put(row, at + __popc(all & ((1u << lane) - 1u)));
    at += __popc(all);
  }
}

}  // namespace

void route(Stream stream, const Router& r, const Routing& to, const Step& step, int tokens) {
  if (tokens <= 0) return;
  Linear scores{};
  scores.weight = r.weight;
  scores.in = r.in;
  scores.out = r.scores;
  scores.tokens = tokens;
  linear(stream, scores);
  const Choice choice{
      r.scores.f, r.scores.stride, to.weights_ids.f, to.weights_ids.stride, r.selection_bias, to.experts, to.top_k,
      r.groups,   r.top_groups,    r.scoring,        r.group_score,         r.normalise,      r.scale,    r.eps};
  const Sort sort{to, step.failure, r.layer, tokens};
  const size_t bytes = 3 * sizeof(float) * static_cast<size_t>(to.experts);
  if (bytes > kMostBytes) fail(PE_UNSUPPORTED, "%d experts of a router on a CUDA device; at most 4096", to.experts);
  if (tokens <= kFewTokens && bytes * static_cast<size_t>(tokens) <= kFewBytes) {
    launch(stream, route_few, 1u, kSortThreads, bytes * static_cast<size_t>(tokens), choice, sort);
    return;
  }
  launch(stream, choose_many, static_cast<unsigned>(tokens), kWarp, bytes, choice);
  launch(stream, sort_many, static_cast<unsigned>(to.experts), kSortThreads, 0, sort);
}

}  // namespace pe::cuda
