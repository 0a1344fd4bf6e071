// Between the linear of q, k and v and attention: norms of heads, rope, append to the cache. A warp has a head of a
// token and holds it in shared memory.
#include "cuda/device.h"
#include "cuda/kv_layout.h"

namespace pe::cuda {

namespace {

constexpr int kWarps = 4;  // of a block, each with a head of its own
constexpr size_t kSharedBytes = 48 * 1024;

// 1 / sqrt(mean(x^2) + eps) over a warp's row
__device__ __forceinline__ float inverse_rms(const float* x, int64_t n, float eps) {
  float sum = 0.0f;
  for (int64_t i = lane_id(); i < n; i += kWarp) sum = fmaf(x[i], x[i], sum);
  return 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(n) + eps);
}

__device__ __forceinline__ void norm_row(float* x, const float* weight, int64_t n, float eps) {
  const float inverse = inverse_rms(x, n, eps);
  __syncwarp();
  for (int64_t i = lane_id(); i < n; i += kWarp) x[i] = __fmul_rn(__fmul_rn(x[i], inverse), weight[i]);
  __syncwarp();
}

// The first columns of x, half-split pairs.
__device__ __forceinline__ void rope_row(float* x, const Rope& rope, int32_t position) {
  const int half = rope.rotary_dim / 2;
  const float *cos = rope.values + int64_t{position} * rope.rotary_dim, *sin = cos + half;
  for (int i = lane_id(); i < half; i += kWarp) {
    const float a = x[i], b = x[half + i];
    x[i] = fmaf(-b, sin[i], __fmul_rn(a, cos[i]));
    x[half + i] = fmaf(a, sin[i], __fmul_rn(b, cos[i]));
  }
  __syncwarp();
}

// x / scale to the nearest even, scale = max |x| / 127. A NaN or Inf makes the scale NaN.
__device__ __forceinline__ void append_int8(const float* x, int dim, int stride, int8_t* row, float* scale) {
  float max = 0.0f;
  bool finite = true;
  for (int i = lane_id(); i < dim; i += kWarp) {
    const float size = fabsf(x[i]);
    finite = finite && size < __int_as_float(0x7f800000);
    max = fmaxf(max, size);
  }
  max = warp_max(max);
  finite = __all_sync(kAllLanes, finite);
  const float inverse = max > 0.0f ? 127.0f / max : 0.0f;
  const bool tiny = !(inverse < 3.0e38f);  // 127 / max overflows: such values count as 0
  const float by = tiny || !finite ? 0.0f : inverse;
  for (int i = lane_id(); i < stride; i += kWarp)
    row[i] = static_cast<int8_t>(i < dim && finite ? __float2int_rn(__fmul_rn(x[i], by)) : 0);
  if (lane_id() == 0) *scale = !finite ? __int_as_float(0x7fc00000) : tiny ? 0.0f : max / 127.0f;
}

// Row `slot` of K or V of a head of a block, from `at` on; its scales stand at `scales`.
__device__ __forceinline__ void append_row(const float* x, int dim, int stride, int dtype, int slot, uint8_t* at,
                                           uint8_t* scales) {
  const int64_t first = int64_t{slot} * stride;
  if (dtype == PE_KV_INT8)
    return append_int8(x, dim, stride, reinterpret_cast<int8_t*>(at) + first, reinterpret_cast<float*>(scales) + slot);
  for (int i = lane_id(); i < stride; i += kWarp) {
    const float value = i < dim ? x[i] : 0.0f;
    if (dtype == PE_KV_F32)
      reinterpret_cast<float*>(at)[first + i] = value;
    else
      reinterpret_cast<uint16_t*>(at)[first + i] = to_bf16(value);
  }
}

__device__ __forceinline__ uint8_t* block_of(const KvView& kv, const Step& step, int64_t token, int32_t position) {
  const int64_t row = int64_t{step.sequences[token]} * step.table_width;
  return kv.base + int64_t{kv.table[row + position / kKvBlock]} * kv.block_bytes;
}

__device__ __forceinline__ void append_k(const KvView& kv, const float* x, uint8_t* head, int slot) {
  append_row(x, kv.k_dim, kv.k_stride, kv.dtype, slot, head, head + kv.k_scales);
}

__device__ __forceinline__ void append_v(const KvView& kv, const float* x, uint8_t* head, int slot) {
  append_row(x, kv.v_dim, kv.v_stride, kv.dtype, slot, head + kv.v_offset, head + kv.v_scales);
}

// Norms over all of q (block 0 of a token) and all of k (block 1).
__global__ void __launch_bounds__(256)
    norm_whole(Heads h, Rows qkv, const float* q_norm, const float* k_norm, float eps) {
  __shared__ float sums[256 / kWarp];
  wait_for_previous();
  const int64_t token = blockIdx.x / 2;
  const bool k = blockIdx.x % 2;
  float* x = qkv.f + token * qkv.stride + (k ? h.k_column : 0);
  const float* weight = k ? k_norm : q_norm;
  const int64_t n = int64_t{k ? h.kv_heads : h.heads} * h.head_dim;
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i < n; i += 256) sum = fmaf(x[i], x[i], sum);
  sum = warp_sum(sum);
  if (lane_id() == 0) sums[warp_id()] = sum;
  __syncthreads();
  let_next_start();
  float total = 0.0f;
  for (float part : sums) total += part;
  const float inverse = 1.0f / sqrtf(total / static_cast<float>(n) + eps);
  for (int64_t i = threadIdx.x; i < n; i += 256) x[i] = __fmul_rn(__fmul_rn(x[i], inverse), weight[i]);
}

struct HeadWork {
  Heads heads;
  Rows qkv;
  const float *q_norm, *k_norm;  // of a head, or nullptr
  float eps;
  Rope rope;                          // values nullptr: none
  KvView kv;                          // base nullptr: none
  int first_head, last_head, blocks;  // of q, then k, then v; blocks of a token
};

__global__ void __launch_bounds__(kWarps* kWarp) finish_kernel(HeadWork w, Step step) {
  const int64_t token = blockIdx.x / w.blocks;
  const int head = w.first_head + static_cast<int>(blockIdx.x) % w.blocks * kWarps + warp_id();
  wait_for_previous();
  let_next_start();
  if (head >= w.last_head) return;
  const Heads& h = w.heads;
  const int q = h.heads, kv = h.kv_heads, dim = h.head_dim;
  const int64_t column = head < q        ? int64_t{head} * dim
                         : head < q + kv ? h.k_column + int64_t{head - q} * dim
                                         : h.v_column + int64_t{head - q - kv} * dim;
  float* row = w.qkv.f + token * w.qkv.stride + column;
  float* x = reinterpret_cast<float*>(shared_memory()) + int64_t{warp_id()} * dim;
  for (int i = lane_id(); i < dim; i += kWarp) x[i] = row[i];
  __syncwarp();
  const int32_t position = step.positions[token];
  if (head < q + kv) {
    if (w.q_norm) norm_row(x, head < q ? w.q_norm : w.k_norm, dim, w.eps);
    if (w.rope.values) rope_row(x, w.rope, position);
    const float scale = head < q && w.rope.q_scales ? w.rope.q_scales[position] : 1.0f;
    if (w.q_norm || w.rope.values)
      for (int i = lane_id(); i < dim; i += kWarp) row[i] = __fmul_rn(x[i], scale);
  }
  if (!w.kv.base || head < q) return;
  uint8_t* at = block_of(w.kv, step, token, position) + int64_t{(head - q) % kv} * w.kv.head_bytes;
  if (head < q + kv)
    append_k(w.kv, x, at, position % kKvBlock);
  else
    append_v(w.kv, x, at, position % kKvBlock);
}

struct LatentWork {
  Rows in;
  const float* norm;
  float eps;
  int tokens;
  Rope rope;
  KvView kv;
};

__global__ void __launch_bounds__(kWarps* kWarp) latent_kernel(LatentWork w, Step step) {
  const int64_t token = int64_t{blockIdx.x} * kWarps + warp_id();
  wait_for_previous();
  let_next_start();
  if (token >= w.tokens) return;
  const int dim = w.kv.k_dim, latent = w.kv.v_dim;
  float *row = w.in.f + token * w.in.stride, *x = reinterpret_cast<float*>(shared_memory()) + int64_t{warp_id()} * dim;
  for (int i = lane_id(); i < dim; i += kWarp) x[i] = row[i];
  __syncwarp();
  const int32_t position = step.positions[token];
  norm_row(x, w.norm, latent, w.eps);
  rope_row(x + latent, w.rope, position);
  for (int i = lane_id(); i < dim; i += kWarp) row[i] = x[i];
  uint8_t* head = block_of(w.kv, step, token, position);
  append_k(w.kv, x, head, position % kKvBlock);
  append_v(w.kv, x, head, position % kKvBlock);
}

size_t shared_of(int dim) {
  const size_t bytes = static_cast<size_t>(dim) * kWarps * sizeof(float);
  if (bytes > kSharedBytes)
    fail(PE_UNSUPPORTED, "heads of %d columns; the CUDA backend takes at most %zu", dim,
         kSharedBytes / (kWarps * sizeof(float)));
  return bytes;
}

}  // namespace

void finish_heads(Stream stream, const FinishHeads& f, const Step& step) {
  const Heads& h = f.heads;
  if (f.q_norm && f.whole_norms)
    launch(stream, norm_whole, dim3(2 * static_cast<unsigned>(f.tokens)), dim3(256), 0, h, f.qkv, f.q_norm, f.k_norm,
           f.eps);
  HeadWork w{};
  w.heads = h;
  w.qkv = f.qkv;
  if (!f.whole_norms) w.q_norm = f.q_norm, w.k_norm = f.k_norm;
  w.eps = f.eps;
  if (f.rope) w.rope = *f.rope;
  if (f.kv) w.kv = *f.kv;
  const bool in_place = w.q_norm || f.rope;
  if (!in_place && !f.kv) return;
  w.first_head = in_place ? 0 : h.heads;
  w.last_head = h.heads + (f.kv ? 2 : 1) * h.kv_heads;
  w.blocks = (w.last_head - w.first_head + kWarps - 1) / kWarps;
  launch(stream, finish_kernel, dim3(static_cast<unsigned>(f.tokens * w.blocks)), dim3(kWarps * kWarp),
         shared_of(h.head_dim), w, step);
}

void latent_append(Stream stream, const Rows& in, const float* norm, float eps, const Rope& rope, const KvView& kv,
                   const Step& step, int tokens) {
  const LatentWork w{in, norm, eps, tokens, rope, kv};
  launch(stream, latent_kernel, dim3(static_cast<unsigned>((tokens + kWarps - 1) / kWarps)), dim3(kWarps * kWarp),
         shared_of(kv.k_dim), w, step);
}

}  // namespace pe::cuda
