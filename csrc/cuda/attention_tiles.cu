// Attention of many tokens over a bfloat16 or int8 cache, on the bfloat16 tensor cores (FlashAttention-2, Dao 2023). K
// and V are exact there, int8 too. The float32 side, q and the weights, goes in as two bfloat16 pieces, hi + lo: what
// is lost is at most 2^-16 of a value, 1/128 of what rounding to the cache cost. Sums are float32.
//
// A block has 16 rows a warp and walks the blocks of 32 keys. K and V have one buffer each: K of the next block is on
// its way while V is computed with, V of this one during K. Keys are added in the order of their positions in steps
// that start at multiples of 16, so a row's bits do not depend on the tile.
#include "cuda/attention_rows.cuh"
#include "cuda/kv_layout.h"
#include "cuda/math.cuh"

namespace pe::cuda {

namespace {

constexpr int kMostWarps = 4, kWarpRows = 16, kMostHeads = 16;
constexpr int kKeyTiles = kKvBlock / 8;  // of scores: 8 keys each
constexpr size_t kSharedLimit = 98 * 1024;

__device__ __forceinline__ float minus_inf() { return -__int_as_float(0x7f800000); }

// Bytes between rows in shared memory: 8 rows' 16 bytes lie in different banks.
__host__ __device__ constexpr int padded_bytes(int columns) { return 2 * columns + 16; }

// The upper halves of two floats, and what they leave of them.
__device__ __forceinline__ uint32_t upper(float x0, float x1) {
  return (__float_as_uint(x0) >> 16) | (__float_as_uint(x1) & 0xffff0000u);
}
__device__ __forceinline__ float rest(float x) { return x - __uint_as_float(__float_as_uint(x) & 0xffff0000u); }

struct Tile {
  uint8_t *q_hi, *q_lo, *k, *v;  // bfloat16 [rows][k_stride], twice; [32][k_stride], [32][v_stride]
  float *k_scales, *v_scales;    // [32] of an int8 cache
  int32_t *begin, *end;          // [rows] keys
  int first, last;               // of any row
};

__device__ __forceinline__ Tile tile_in_shared(const Attention& a, int rows) {
  Tile t;
  uint8_t* at = shared_memory();
  const auto take = [&](int bytes) {
    uint8_t* mine = at;
    at += bytes;
    return mine;
  };
  t.q_hi = take(rows * padded_bytes(a.kv.k_stride));
  t.q_lo = take(rows * padded_bytes(a.kv.k_stride));
  t.k = take(kKvBlock * padded_bytes(a.kv.k_stride));
  t.v = take(kKvBlock * padded_bytes(a.kv.v_stride));
  t.k_scales = reinterpret_cast<float*>(take(kKvBlock * 4));
  t.v_scales = reinterpret_cast<float*>(take(kKvBlock * 4));
  t.begin = reinterpret_cast<int32_t*>(take(rows * 4));
  t.end = reinterpret_cast<int32_t*>(take(rows * 4));
  return t;
}

size_t shared_bytes(const Attention& a, int rows) {
  return static_cast<size_t>((2 * rows + kKvBlock) * padded_bytes(a.kv.k_stride) +
                             kKvBlock * padded_bytes(a.kv.v_stride) + 2 * kKvBlock * 4 + 2 * rows * 4);
}

__device__ __forceinline__ bool row_used(const AttentionWork& w, const BlockRows& b, int row) {
  return row % w.row_heads < b.heads && row / w.row_heads < b.tokens;
}

// q in its two pieces, and the keys of every row; a row that is not used has none.
__device__ __forceinline__ void load_tile(const AttentionWork& w, const BlockRows& b, Tile& t) {
  const Attention& a = w.a;
  const int rows = static_cast<int>(blockDim.x) / kWarp * kWarpRows, stride = padded_bytes(a.kv.k_stride);
  for (int row = warp_id(); row < rows; row += static_cast<int>(blockDim.x) / kWarp) {
    const bool used = row_used(w, b, row);
    const int64_t token = b.first_token + row / w.row_heads, head = b.first_head + row % w.row_heads;
    const float* q = a.q.f + token * a.q.stride + head * a.head_dim;
    for (int d = 2 * lane_id(); d < a.kv.k_stride; d += 2 * kWarp) {
      const float x0 = used && d < a.head_dim ? q[d] : 0.0f, x1 = used && d + 1 < a.head_dim ? q[d + 1] : 0.0f;
      *reinterpret_cast<uint32_t*>(t.q_hi + row * stride + 2 * d) = upper(x0, x1);
      *reinterpret_cast<uint32_t*>(t.q_lo + row * stride + 2 * d) =
          to_bf16(rest(x0)) | static_cast<uint32_t>(to_bf16(rest(x1))) << 16;
    }
    if (lane_id() != 0) continue;
    const int32_t end = used ? w.step.positions[token] + 1 : 0;
    t.end[row] = end;
    t.begin[row] = a.window > 0 ? ::max(0, end - a.window) : 0;
  }
  const int32_t position = w.step.positions[b.first_token];  // they are consecutive
  t.first = a.window > 0 ? ::max(0, position + 1 - a.window) : 0;
  t.last = position + b.tokens;
}

// 32 rows of K or V, in bfloat16 once they have arrived. Those from `rows` on become zeros: an earlier owner's NaN
// there would not leave with a weight of 0.
template <bool INT8>
__device__ __forceinline__ void fetch(const uint8_t* from, int columns, int rows, uint8_t* to) {
  const int pieces = columns / (INT8 ? 16 : 8);  // of 16 bytes in the cache
  for (int i = static_cast<int>(threadIdx.x); i < kKvBlock * pieces; i += static_cast<int>(blockDim.x)) {
    const int row = i / pieces, piece = i % pieces;
    uint8_t* at = to + row * padded_bytes(columns) + piece * (INT8 ? 32 : 16);
    if (row >= rows) {
      *reinterpret_cast<uint4*>(at) = make_uint4(0, 0, 0, 0);
      if (INT8) *reinterpret_cast<uint4*>(at + 16) = make_uint4(0, 0, 0, 0);
    } else if constexpr (INT8) {
      const uint4 bytes = *reinterpret_cast<const uint4*>(from + int64_t{row} * columns + 16 * piece);
      const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
      uint32_t pairs[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t two = words[j / 2] >> (16 * (j % 2));
        pairs[j] =
            upper(static_cast<float>(static_cast<int8_t>(two)), static_cast<float>(static_cast<int8_t>(two >> 8)));
      }
      *reinterpret_cast<uint4*>(at) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      *reinterpret_cast<uint4*>(at + 16) = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
    } else {
      copy_async16(at, from + int64_t{row} * columns * 2 + 16 * piece);
    }
  }
  copy_async_commit();
}

__device__ __forceinline__ void fetch_scales(const uint8_t* from, float* to) {
  if (threadIdx.x < kKvBlock) to[threadIdx.x] = reinterpret_cast<const float*>(from)[threadIdx.x];
}

// A warp's 16 rows. As mma has them: with g = lane / 4 and t = lane % 4, a lane has rows g and g + 8, and of 8 columns
// 2t and 2t + 1.
template <int V_TILES>
struct WarpRows {
  float acc[V_TILES][4];
  float max[2], sum[2];  // sum: this lane's part
  int32_t begin[2], end[2];
};

// q . k of the rows and 32 keys.
template <int K_STEPS>
__device__ __forceinline__ void score_tile(const Attention& a, const Tile& t, float (&s)[kKeyTiles][4]) {
  const int stride = padded_bytes(a.kv.k_stride), steps = a.kv.k_stride / 16, lane = lane_id();
  const int q_row = warp_id() * kWarpRows + lane % 16, q_at = q_row * stride + lane / 16 * 16;
  const int k_at = (lane / 16 * 8 + lane % 8) * stride + lane / 8 % 2 * 16;
#pragma unroll
  for (int j = 0; j < kKeyTiles; ++j) s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.0f;
#pragma unroll
  for (int step = 0; step < K_STEPS; ++step) {
    if (step >= steps) break;
    uint32_t hi[4], lo[4];
    load_matrices(hi, t.q_hi + q_at + 32 * step);
    load_matrices(lo, t.q_lo + q_at + 32 * step);
#pragma unroll
    for (int j = 0; j < kKeyTiles; j += 2) {
      uint32_t k[4];
      load_matrices(k, t.k + k_at + 8 * j * stride + 32 * step);
      const uint32_t first[2] = {k[0], k[1]}, second[2] = {k[2], k[3]};
      mma_bf16(s[j], lo, first);
      mma_bf16(s[j], hi, first);
      mma_bf16(s[j + 1], lo, second);
      mma_bf16(s[j + 1], hi, second);
    }
  }
}

// Scores -> weights, and what was summed up so far brought to the new maximum.
template <bool INT8, int V_TILES>
__device__ __forceinline__ void weigh_tile(const Attention& a, const Tile& t, int key0, float (&s)[kKeyTiles][4],
                                           WarpRows<V_TILES>& rows) {
  const int column = lane_id() % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = minus_inf();
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        const int at = 8 * j + column + e % 2, key = key0 + at;
        float x = __fmul_rn(s[j][e], a.scale);
        if (INT8) x = __fmul_rn(x, t.k_scales[at]);
        if (a.softcap > 0.0f) x = __fmul_rn(a.softcap, tanh_of(x / a.softcap));
        s[j][e] = rows.begin[half] <= key && key < rows.end[half] ? x : minus_inf();
        top = fmaxf(top, s[j][e]);
      }
    }
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
    top = fmaxf(top, rows.max[half]);
    const float shift = top == minus_inf() ? 0.0f : top;  // no key of this row so far
    const float factor = exp_of(rows.max[half] - shift);
    rows.max[half] = top;
    float sum = __fmul_rn(rows.sum[half], factor);
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        float weight = exp_of(s[j][e] - shift);
        sum += weight;
        const int at = 8 * j + column + e % 2;
        if (INT8) weight = rows.begin[half] <= key0 + at && key0 + at < rows.end[half] ? weight * t.v_scales[at] : 0.0f;
        s[j][e] = weight;
      }
    }
    rows.sum[half] = sum;
#pragma unroll
    for (int tile = 0; tile < V_TILES; ++tile) {
      rows.acc[tile][2 * half] = __fmul_rn(rows.acc[tile][2 * half], factor);
      rows.acc[tile][2 * half + 1] = __fmul_rn(rows.acc[tile][2 * half + 1], factor);
    }
  }
}

// acc += weights . V: the scores' fragments are those of the left operand.
template <int V_TILES>
__device__ __forceinline__ void value_tile(const Attention& a, const Tile& t, const float (&s)[kKeyTiles][4],
                                           WarpRows<V_TILES>& rows) {
  const int stride = padded_bytes(a.kv.v_stride), tiles = a.kv.v_stride / 8, lane = lane_id();
  const int v_at = lane % 16 * stride + lane / 16 * 16;
#pragma unroll
  for (int step = 0; step < kKeyTiles / 2; ++step) {
    uint32_t hi[4], lo[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x0 = s[2 * step + i / 2][i % 2 * 2], x1 = s[2 * step + i / 2][i % 2 * 2 + 1];
      hi[i] = upper(x0, x1);
      lo[i] = upper(rest(x0), rest(x1));
    }
#pragma unroll
    for (int tile = 0; tile < V_TILES; tile += 2) {
      if (tile >= tiles) break;
      uint32_t v[4];
      load_matrices_transposed(v, t.v + v_at + 16 * step * stride + 16 * tile);
      const uint32_t first[2] = {v[0], v[1]}, second[2] = {v[2], v[3]};
      mma_bf16(rows.acc[tile], lo, first);
      mma_bf16(rows.acc[tile], hi, first);
      mma_bf16(rows.acc[tile + 1], lo, second);
      mma_bf16(rows.acc[tile + 1], hi, second);
    }
  }
}

template <int V_TILES>
__device__ __forceinline__ void store_tile(const AttentionWork& w, const BlockRows& b, const WarpRows<V_TILES>& rows) {
  const Attention& a = w.a;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = rows.sum[half];
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
    const int row = warp_id() * kWarpRows + lane_id() / 4 + 8 * half;
    if (!row_used(w, b, row)) continue;
    float* out = a.out.f + int64_t{b.first_token + row / w.row_heads} * a.out.stride +
                 int64_t{b.first_head + row % w.row_heads} * a.kv.v_dim;
#pragma unroll
    for (int tile = 0; tile < V_TILES; ++tile) {
      const int column = 8 * tile + lane_id() % 4 * 2;
      if (column < a.kv.v_dim) out[column] = rows.acc[tile][2 * half] / sum;
      if (column + 1 < a.kv.v_dim) out[column + 1] = rows.acc[tile][2 * half + 1] / sum;
    }
  }
}

// K_STEPS: of 16 columns of K, at most; V_TILES: of 8 columns of V.
template <bool INT8, int K_STEPS, int V_TILES>
__global__ void __launch_bounds__(kMostWarps* kWarp) tile_kernel(AttentionWork w) {
  const Attention& a = w.a;
  const int per_tile = a.kv.kv_heads * w.head_chunks, task = static_cast<int>(blockIdx.x) % per_tile;
  BlockRows b = heads_of(w, task / w.head_chunks, task % w.head_chunks);
  const int tile = static_cast<int>(gridDim.x - 1 - blockIdx.x) / per_tile;  // last ones first: they have the most keys
  int sequence;
  wait_for_previous();
  let_next_start();
  if (!find_tile(w, tile, b, sequence)) return;
  Tile t = tile_in_shared(a, static_cast<int>(blockDim.x) / kWarp * kWarpRows);
  load_tile(w, b, t);
  __syncthreads();
  WarpRows<V_TILES> rows = {};
  int first = 0x7fffffff, last = 0;  // keys of the warp's rows
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_id() * kWarpRows + lane_id() / 4 + 8 * half;
    rows.max[half] = minus_inf();
    rows.begin[half] = t.begin[row];
    rows.end[half] = t.end[row];
    if (rows.end[half] == 0) continue;
    first = ::min(first, rows.begin[half]);
    last = ::max(last, rows.end[half]);
  }
  first = __reduce_min_sync(kAllLanes, first);
  last = __reduce_max_sync(kAllLanes, last);
  const int32_t* table = a.kv.table + int64_t{sequence} * w.step.table_width;
  const auto head_of = [&](int block) {
    return a.kv.base + int64_t{table[block]} * a.kv.block_bytes + int64_t{b.kv_head} * a.kv.head_bytes;
  };
  const auto fetch_k = [&](int block) {
    if (block * kKvBlock >= t.last) return copy_async_commit();
    fetch<INT8>(head_of(block), a.kv.k_stride, kKvBlock, t.k);
    if (INT8) fetch_scales(head_of(block) + a.kv.k_scales, t.k_scales);
  };
  const auto fetch_v = [&](int block) {
    fetch<INT8>(head_of(block) + a.kv.v_offset, a.kv.v_stride, t.last - block * kKvBlock, t.v);
    if (INT8) fetch_scales(head_of(block) + a.kv.v_scales, t.v_scales);
  };
  fetch_k(t.first / kKvBlock);
  for (int block = t.first / kKvBlock; block * kKvBlock < t.last; ++block) {
    const int key0 = block * kKvBlock;
    const bool wanted = key0 < last && key0 + kKvBlock > first;
    float s[kKeyTiles][4];
    fetch_v(block);
    copy_async_wait<1>();
    __syncthreads();  // K is there
    if (wanted) {
      score_tile<K_STEPS>(a, t, s);
      weigh_tile<INT8>(a, t, key0, s, rows);
    }
    __syncthreads();  // and no longer needed
    fetch_k(block + 1);
    copy_async_wait<1>();
    __syncthreads();  // V is there
    if (wanted) value_tile(a, t, s, rows);
    __syncthreads();
  }
  store_tile(w, b, rows);
}

template <bool INT8>
void launch_tiles(Stream stream, const AttentionWork& w, int warps) {
  const Attention& a = w.a;
  const int wide = a.kv.k_stride > a.kv.v_stride ? a.kv.k_stride : a.kv.v_stride;
  const auto kernel = wide <= 64    ? tile_kernel<INT8, 4, 8>
                      : wide <= 128 ? tile_kernel<INT8, 8, 16>
                                    : tile_kernel<INT8, 16, 32>;
  const size_t shared = shared_bytes(a, warps * kWarpRows);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
        "shared memory of attention");
  launch(stream, kernel, dim3(tile_blocks(w)), dim3(static_cast<unsigned>(warps * kWarp)), shared, w);
}

}  // namespace

bool tiles_fit(const Attention& a) { return a.kv.dtype != PE_KV_F32 && a.kv.k_stride <= 256 && a.kv.v_stride <= 256; }

void attention_tiles(Stream stream, const Attention& a, const Step& step) {
  int warps = kMostWarps;
  while (shared_bytes(a, warps * kWarpRows) > kSharedLimit) warps /= 2;
  const AttentionWork w = attention_work(a, step, warps * kWarpRows, kMostHeads, false);
  a.kv.dtype == PE_KV_INT8 ? launch_tiles<true>(stream, w, warps) : launch_tiles<false>(stream, w, warps);
}

}  // namespace pe::cuda
