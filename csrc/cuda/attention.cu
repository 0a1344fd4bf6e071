// The attention op (docs of PE_OP_ATTENTION). Few tokens: a block a (token, KV head, partition), then a kernel that
// merges the partials of a token and head. Many: a block a tile of tokens, which walks the partitions and merges as it
// goes.
#include "cuda/attention.cuh"

#include <algorithm>

#include "cuda/attention_rows.cuh"
#include "cuda/quantize.cuh"

namespace pe::cuda {

namespace {

constexpr int kMaxRows = 8;
constexpr size_t kSharedLimit = 99 * 1024;       // what a block may have on sm_86 and sm_89
constexpr size_t kManyFloats = size_t{1} << 24;  // of partials, for more than kFewTokens tokens
constexpr int kMaxColumns = 8 * kAttentionThreads;
constexpr int kMergeSlices = 4;

template <int R>
__device__ __forceinline__ AttentionShared<R> shared_of(const AttentionWork& w, RowRanges<R>* rows,
                                                        const uint8_t** blocks, float* max, float* sum) {
  uint8_t* base = shared_memory();
  float* q = reinterpret_cast<float*>(base + kRingBytes);
  return {base, q, q + R * w.a.kv.k_stride, max, sum, rows, blocks};
}

// q and the key ranges of the rows, in shared memory; rows past the block's have no keys.
template <int R>
__device__ __forceinline__ void load_rows(const AttentionWork& w, const BlockRows& b, const AttentionShared<R>& s) {
  const Attention& a = w.a;
  RowRanges<R>& rows = *s.rows;
  const auto used = [&](int r) { return r % w.row_heads < b.heads && r / w.row_heads < b.tokens; };
  if (threadIdx.x == 0) {
    rows.first = 0x7fffffff;
    rows.last = 0;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int32_t position = used(r) ? w.step.positions[b.first_token + r / w.row_heads] : -1;
      rows.end[r] = position + 1;
      rows.begin[r] = a.window > 0 ? ::max(0, position + 1 - a.window) : 0;
      if (position < 0) continue;
      rows.first = ::min(rows.first, rows.begin[r]);
      rows.last = ::max(rows.last, rows.end[r]);
    }
  }
  for (int r = 0; r < R; ++r) {
    const float* q = used(r) ? a.q.f + int64_t{b.first_token + r / w.row_heads} * a.q.stride +
                                   int64_t{b.first_head + r % w.row_heads} * a.head_dim
                             : nullptr;
    for (int d = static_cast<int>(threadIdx.x); d < a.kv.k_stride; d += kAttentionThreads)
      s.q[r * a.kv.k_stride + d] = q && d < a.head_dim ? q[d] : 0.0f;
  }
}

// Partials: acc [token][head][partition][v_stride], then (max, sum) in the same order.
__device__ __forceinline__ int64_t partial_of(const Attention& a, int64_t token, int64_t head, int partition) {
  return (token * a.heads + head) * a.max_partitions + partition;
}
__device__ __forceinline__ float* sums_of(const Attention& a) {
  return a.partials + int64_t{a.tokens} * a.heads * a.max_partitions * a.kv.v_stride;
}

template <int DTYPE, int R>
__global__ void __launch_bounds__(kAttentionThreads, 2) split_kernel(AttentionWork w) {
  __shared__ RowRanges<R> ranges;
  __shared__ const uint8_t* blocks[kAttentionWarps];
  __shared__ float max[R], sum[R];
  const Attention& a = w.a;
  const int task = static_cast<int>(blockIdx.x) / w.head_chunks, partition = static_cast<int>(blockIdx.y);
  BlockRows b = heads_of(w, task % a.kv.kv_heads, static_cast<int>(blockIdx.x) % w.head_chunks);
  b.first_token = task / a.kv.kv_heads;
  // No kernel writes a Step or a table, so they are there before the kernel in front has ended. It may still write the
  // cache, but what is on its way to the L2 meets what is written there.
  const int32_t position = w.step.positions[b.first_token];
  const int first_key = a.window > 0 ? ::max(0, position + 1 - a.window) : 0;
  const int32_t* table = a.kv.table + int64_t{w.step.sequences[b.first_token]} * w.step.table_width;
  const bool empty = partition > position / kPartition || (partition + 1) * kPartition <= first_key;
  if (!empty) ask_for(block_of(a.kv, table, b.kv_head, partition, first_key, position + 1), 0, a.kv.head_bytes);
  wait_for_previous();
  let_next_start();
  if (empty) return;
  const AttentionShared<R> s = shared_of<R>(w, &ranges, blocks, max, sum);
  load_rows<R>(w, b, s);
  const int64_t first = partial_of(a, b.first_token, b.first_head, partition);
  attend_partition<DTYPE, R>(
      a, s, table, b.kv_head, partition,
      [&](int r) {
        if (r >= b.heads) return;
        float* to = sums_of(a) + 2 * (first + int64_t{r} * a.max_partitions);
        to[0] = max[r];
        to[1] = sum[r];
      },
      [&](int r, int column, float x) {
        if (r < b.heads) a.partials[(first + int64_t{r} * a.max_partitions) * a.kv.v_stride + column] = x;
      });
}

template <int DTYPE, int R>
__global__ void __launch_bounds__(kAttentionThreads, 2) walk_kernel(AttentionWork w) {
  __shared__ RowRanges<R> ranges;
  __shared__ const uint8_t* blocks[kAttentionWarps];
  __shared__ float max[R], sum[R], run_max[R], run_sum[R], mine[R], other[R];
  const Attention& a = w.a;
  const int per_tile = a.kv.kv_heads * w.head_chunks, task = static_cast<int>(blockIdx.x) % per_tile;
  BlockRows b = heads_of(w, task / w.head_chunks, task % w.head_chunks);
  const int tile = static_cast<int>(gridDim.x - 1 - blockIdx.x) / per_tile;  // last ones first: they have the most keys
  int sequence;
  wait_for_previous();
  let_next_start();
  if (!find_tile(w, tile, b, sequence)) return;
  const AttentionShared<R> s = shared_of<R>(w, &ranges, blocks, max, sum);
  float* acc = s.weights + kPartition * R;  // [R][v_stride]
  load_rows<R>(w, b, s);
  for (int i = static_cast<int>(threadIdx.x); i < R * a.kv.v_stride; i += kAttentionThreads) acc[i] = 0.0f;
  if (threadIdx.x < R) run_max[threadIdx.x] = -__int_as_float(0x7f800000), run_sum[threadIdx.x] = 0.0f;
  __syncthreads();
  const int32_t* table = a.kv.table + int64_t{sequence} * w.step.table_width;
  for (int p = ranges.first / kPartition; p * kPartition < ranges.last; ++p) {
    attend_partition<DTYPE, R>(
        a, s, table, b.kv_head, p,
        [&](int r) {
          mine[r] = 1.0f;
          other[r] = 0.0f;
          if (ranges.begin[r] >= (p + 1) * kPartition || ranges.end[r] <= p * kPartition) return;  // no key in it
          const float top = fmaxf(run_max[r], max[r]);
          mine[r] = exp_of(run_max[r] - top);
          other[r] = exp_of(max[r] - top);
          run_sum[r] = fmaf(run_sum[r], mine[r], __fmul_rn(sum[r], other[r]));
          run_max[r] = top;
        },
        [&](int r, int column, float x) {
          float& total = acc[r * a.kv.v_stride + column];
          total = fmaf(total, mine[r], other[r] == 0.0f ? 0.0f : __fmul_rn(x, other[r]));
        });
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < R * a.kv.v_dim; i += kAttentionThreads) {
    const int r = i / a.kv.v_dim, column = i % a.kv.v_dim;
    if (r % w.row_heads >= b.heads || r / w.row_heads >= b.tokens) continue;
    a.out.f[int64_t{b.first_token + r / w.row_heads} * a.out.stride +
            int64_t{b.first_head + r % w.row_heads} * a.kv.v_dim + column] =
        acc[r * a.kv.v_stride + column] / run_sum[r];
  }
}

// 64 columns of a token's output. Every 4th partition is a thread's, ascending; the four sums are added ascending.
__global__ void __launch_bounds__(kMergeSlices* kActGroup) merge_kernel(Attention a, Step step) {
  __shared__ float tops[kMergeSlices][kActGroup], sums[kMergeSlices][kActGroup], accs[kMergeSlices][kActGroup];
  const int in_group = static_cast<int>(threadIdx.x) % kActGroup, slice = static_cast<int>(threadIdx.x) / kActGroup;
  const int groups = (a.heads * a.kv.v_dim + kActGroup - 1) / kActGroup;
  const int64_t token = blockIdx.x / static_cast<unsigned>(groups);
  const int group = static_cast<int>(blockIdx.x) % groups, column = group * kActGroup + in_group;
  const bool used = column < a.heads * a.kv.v_dim;
  wait_for_previous();
  let_next_start();
  const int32_t position = step.positions[token];
  const int first = a.window > 0 ? ::max(0, position + 1 - a.window) / kPartition : 0;
  const int end = used ? position / kPartition + 1 : 0;
  const int64_t base = partial_of(a, token, used ? column / a.kv.v_dim : 0, 0);
  const float2* numbers = reinterpret_cast<const float2*>(sums_of(a)) + base;  // max, sum
  const float* acc = a.partials + base * a.kv.v_stride + column % a.kv.v_dim;
  float top = -__int_as_float(0x7f800000);
#pragma unroll 4
  for (int p = first + slice; p < end; p += kMergeSlices) top = fmaxf(top, numbers[p].x);
  tops[slice][in_group] = top;
  __syncthreads();
  for (int s = 0; s < kMergeSlices; ++s) top = fmaxf(top, tops[s][in_group]);
  float sum = 0.0f, total = 0.0f;
#pragma unroll 4
  for (int p = first + slice; p < end; p += kMergeSlices) {
    const float2 n = numbers[p];
    const float factor = exp_of(n.x - top);
    sum = fmaf(n.y, factor, sum);
    total = fmaf(acc[int64_t{p} * a.kv.v_stride], factor, total);
  }
  sums[slice][in_group] = sum;
  accs[slice][in_group] = total;
  __syncthreads();
  if (slice == 0) {
    for (int s = 1; s < kMergeSlices; ++s) sum += sums[s][in_group], total += accs[s][in_group];
    const float value = used ? total / sum : 0.0f;
    if (used) a.out.f[token * a.out.stride + column] = value;
    accs[0][in_group] = value;
  }
  if (!a.quantize) return;
  __syncthreads();
  if (warp_id() == 0) quantize_group(accs[0][lane_id()], accs[0][lane_id() + kWarp], a.quantized.quant, token, group);
}

// ---- launches -------------------------------------------------------------------------------------------------------

size_t split_floats(const Attention& a, int tokens) {
  return static_cast<size_t>(tokens) * static_cast<size_t>(a.heads) * static_cast<size_t>(a.max_partitions) *
         static_cast<size_t>(a.kv.v_stride + 2);
}

// Few tokens, or many sequences with hardly more than a token each.
bool splits(const Attention& a) {
  return a.tokens <= kFewTokens || (a.tokens < 4 * a.sequences && split_floats(a, a.tokens) <= kManyFloats);
}

size_t shared_bytes(const Attention& a, int rows, bool walk) {
  const int64_t row = int64_t{a.kv.k_stride} + kPartition + (walk ? a.kv.v_stride : 0);
  return static_cast<size_t>(kRingBytes + rows * row * 4);
}

// Rows of a block: up to 8, a power of two, as many as shared memory takes.
int rows_of(const Attention& a, bool walk) {
  const int ratio = a.heads / a.kv.kv_heads;
  int rows = 1;
  while (rows < kMaxRows && (walk || rows < ratio)) rows *= 2;
  while (rows > 1 && shared_bytes(a, rows, walk) > kSharedLimit) rows /= 2;
  if (shared_bytes(a, rows, walk) > kSharedLimit || a.kv.v_stride > kMaxColumns)
    fail(PE_UNSUPPORTED, "attention over heads of %d columns of K and %d of V: too wide for the CUDA backend",
         a.kv.k_dim, a.kv.v_dim);
  return rows;
}

template <int DTYPE, int R>
void launch_rows(Stream stream, const AttentionWork& w, bool split) {
  const Attention& a = w.a;
  const auto kernel = split ? split_kernel<DTYPE, R> : walk_kernel<DTYPE, R>;
  const size_t shared = shared_bytes(a, R, !split);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
        "shared memory of attention");
  const auto blocks = static_cast<unsigned>(a.tokens * a.kv.kv_heads * w.head_chunks);
  const dim3 grid = split ? dim3(blocks, static_cast<unsigned>(a.max_partitions)) : dim3(tile_blocks(w));
  launch(stream, kernel, grid, dim3(kAttentionThreads), shared, w);
}

template <int DTYPE>
void launch_dtype(Stream stream, const AttentionWork& w, int rows, bool split) {
  if (rows == 1) return launch_rows<DTYPE, 1>(stream, w, split);
  if (rows == 2) return launch_rows<DTYPE, 2>(stream, w, split);
  if (rows == 4) return launch_rows<DTYPE, 4>(stream, w, split);
  launch_rows<DTYPE, 8>(stream, w, split);
}

}  // namespace

size_t attention_scratch_floats(const Attention& a) {
  rows_of(a, false);
  rows_of(a, true);
  return std::max(split_floats(a, std::min(a.tokens, kFewTokens)), std::min(split_floats(a, a.tokens), kManyFloats));
}

void attention(Stream stream, const Attention& a, const Step& step) {
  const bool split = splits(a);
  if (!split && tiles_fit(a)) {
    attention_tiles(stream, a, step);
  } else {
    const int rows = rows_of(a, !split);
    const AttentionWork w = attention_work(a, step, rows, rows, split);
    if (a.kv.dtype == PE_KV_F32)
      launch_dtype<PE_KV_F32>(stream, w, rows, split);
    else if (a.kv.dtype == PE_KV_BF16)
      launch_dtype<PE_KV_BF16>(stream, w, rows, split);
    else
      launch_dtype<PE_KV_INT8>(stream, w, rows, split);
  }
  if (split) {
    const int groups = (a.heads * a.kv.v_dim + kActGroup - 1) / kActGroup;
    launch(stream, merge_kernel, dim3(static_cast<unsigned>(a.tokens * groups)), dim3(kMergeSlices * kActGroup), 0, a,
           step);
  } else if (a.quantize) {
    quantize(stream, a.out, a.quantized, a.tokens);
  }
}

}  // namespace pe::cuda
