// A block's part of attention in float32: up to R query rows (tokens x heads of one KV head of one sequence) against
// one partition of 256 keys.
//
// Scores: a warp has a block of 32 keys, a lane a key; K comes through a ring in shared memory, and q stands there as
// float32, so that a lane's one fma chain runs over the head's columns, ascending. Softmax: a warp has a row. Values: a
// thread has 8 columns, and every n-th key (n: what 256 threads have left), ascending; the n sums are added ascending.
// So a row's bits depend on its keys and on the shape of the op, on no other row.
#pragma once

#include "cuda/device.h"
#include "cuda/kv_layout.h"
#include "cuda/math.cuh"

namespace pe::cuda {

constexpr int kAttentionWarps = kPartition / kKvBlock, kAttentionThreads = kAttentionWarps * kWarp;
constexpr int kKeyBytes = 64;               // of a key, in a stage of the ring
constexpr int kKeyStride = kKeyBytes + 16;  // so that 8 lanes' 16 bytes lie in different banks
constexpr int kStages = 3;
constexpr int kStageBytes = kKvBlock * kKeyStride, kWarpRing = kStages * kStageBytes;
constexpr int kRingBytes = kAttentionWarps * kWarpRing;

// 16 bytes of a cache as float32.
template <int DTYPE>
struct Piece;
template <>
struct Piece<PE_KV_F32> {
  static constexpr int kValues = 4;
  static __device__ __forceinline__ void unpack(const uint4& w, float (&v)[4]) {
    v[0] = __uint_as_float(w.x), v[1] = __uint_as_float(w.y), v[2] = __uint_as_float(w.z), v[3] = __uint_as_float(w.w);
  }
};
template <>
struct Piece<PE_KV_BF16> {
  static constexpr int kValues = 8;
  static __device__ __forceinline__ void unpack(const uint4& w, float (&v)[8]) {
    const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = __uint_as_float(words[i] << 16);
      v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
};
__device__ __forceinline__ void unpack_int8(uint32_t word, float* v) {
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = static_cast<float>(static_cast<int8_t>(word >> (8 * i)));
}
template <>
struct Piece<PE_KV_INT8> {
  static constexpr int kValues = 16;
  static __device__ __forceinline__ void unpack(const uint4& w, float (&v)[16]) {
    unpack_int8(w.x, v), unpack_int8(w.y, v + 4), unpack_int8(w.z, v + 8), unpack_int8(w.w, v + 12);
  }
};

// 8 neighbouring values of V.
template <int DTYPE>
__device__ __forceinline__ void load_values(const uint8_t* row, int column, float (&v)[8]) {
  if constexpr (DTYPE == PE_KV_F32) {
    const float4 a = *reinterpret_cast<const float4*>(row + 4 * column);
    const float4 b = *reinterpret_cast<const float4*>(row + 4 * column + 16);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  } else if constexpr (DTYPE == PE_KV_BF16) {
    Piece<PE_KV_BF16>::unpack(*reinterpret_cast<const uint4*>(row + 2 * column), v);
  } else {
    const uint2 w = *reinterpret_cast<const uint2*>(row + column);
    unpack_int8(w.x, v), unpack_int8(w.y, v + 4);
  }
}

template <int R>
struct RowRanges {
  int begin[R], end[R];  // keys of a row
  int first, last;       // of any row
};

// What a block holds in shared memory.
template <int R>
struct AttentionShared {
  uint8_t* ring;     // of K; then the sums of the slices of V
  float* q;          // [R][k_stride]
  float* weights;    // [256][R]
  float *max, *sum;  // [R] of the partition
  RowRanges<R>* rows;
  const uint8_t** blocks;  // [8] of the partition: where the head begins
};

__device__ __forceinline__ float capped(float score, float cap) {
  return cap > 0.0f ? __fmul_rn(cap, tanh_of(score / cap)) : score;
}

// q . key of the warp's 32 keys from `keys` on, a lane a key.
template <int DTYPE, int R>
__device__ __forceinline__ void score_block(const uint8_t* keys, int k_stride, uint8_t* ring, const float* q,
                                            float (&dots)[R]) {
  constexpr int kValues = Piece<DTYPE>::kValues, kElement = 16 / kValues;
  const int row_bytes = k_stride * kElement, chunks = (row_bytes + kKeyBytes - 1) / kKeyBytes;
  const auto fetch = [&](int chunk) {
    if (chunk < chunks) {
#pragma unroll
      for (int j = 0; j < kKeyBytes / 16; ++j) {
        const int piece = lane_id() + j * kWarp, key = piece / (kKeyBytes / 16), part = piece % (kKeyBytes / 16) * 16;
        if (chunk * kKeyBytes + part < row_bytes)
          copy_async16(ring + chunk % kStages * kStageBytes + key * kKeyStride + part,
                       keys + int64_t{key} * row_bytes + chunk * kKeyBytes + part);
      }
    }
    copy_async_commit();
  };
#pragma unroll
  for (int r = 0; r < R; ++r) dots[r] = 0.0f;
  for (int chunk = 0; chunk < kStages - 1; ++chunk) fetch(chunk);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    fetch(chunk + kStages - 1);
    copy_async_wait<kStages - 1>();
    __syncwarp();
    const uint8_t* key = ring + chunk % kStages * kStageBytes + lane_id() * kKeyStride;
#pragma unroll
    for (int part = 0; part < kKeyBytes; part += 16) {
      if (chunk * kKeyBytes + part >= row_bytes) break;
      float k[kValues];
      Piece<DTYPE>::unpack(*reinterpret_cast<const uint4*>(key + part), k);
      const float* column = q + (chunk * kKeyBytes + part) / kElement;
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int j = 0; j < kValues; j += 4) {
          const float4 x = *reinterpret_cast<const float4*>(column + r * k_stride + j);
          dots[r] = fmaf(k[j], x.x, dots[r]);
          dots[r] = fmaf(k[j + 1], x.y, dots[r]);
          dots[r] = fmaf(k[j + 2], x.z, dots[r]);
          dots[r] = fmaf(k[j + 3], x.w, dots[r]);
        }
      }
    }
    __syncwarp();
  }
}

// Scores of the partition into `weights`; -inf outside a row's range.
template <int DTYPE, int R>
__device__ __forceinline__ void score_partition(const Attention& a, const AttentionShared<R>& s, int partition) {
  const int first = partition * kPartition + warp_id() * kKvBlock, key = first + lane_id();
  const RowRanges<R>& rows = *s.rows;
  float dots[R];
  float by = a.scale;
  const bool wanted = first < rows.last && first + kKvBlock > rows.first;
  if (wanted) {
    const uint8_t* head = s.blocks[warp_id()];
    score_block<DTYPE, R>(head, a.kv.k_stride, s.ring + warp_id() * kWarpRing, s.q, dots);
    if (DTYPE == PE_KV_INT8) by = __fmul_rn(by, reinterpret_cast<const float*>(head + a.kv.k_scales)[lane_id()]);
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const bool inside = wanted && rows.begin[r] <= key && key < rows.end[r];
    s.weights[(key - partition * kPartition) * R + r] =
        inside ? capped(__fmul_rn(dots[r], by), a.softcap) : -__int_as_float(0x7f800000);
  }
}

// A warp's row: scores -> exp(s - max), times the scales of V in an int8 cache; exactly 0 outside the row's range.
template <int DTYPE, int R>
__device__ __forceinline__ void softmax_row(const Attention& a, const AttentionShared<R>& s, int partition, int r) {
  const int begin = max(s.rows->begin[r] - partition * kPartition, 0);
  const int end = min(s.rows->end[r] - partition * kPartition, kPartition);
  float top = -__int_as_float(0x7f800000), sum = 0.0f;
  for (int k = lane_id(); k < kPartition; k += kWarp) top = fmaxf(top, s.weights[k * R + r]);
  top = warp_max(top);
  for (int k = lane_id(); k < kPartition; k += kWarp) {
    float weight = 0.0f;
    if (begin <= k && k < end) {
      weight = exp_of(s.weights[k * R + r] - top);
      sum += weight;
      if (DTYPE == PE_KV_INT8)
        weight =
            __fmul_rn(weight, reinterpret_cast<const float*>(s.blocks[k / kKvBlock] + a.kv.v_scales)[k % kKvBlock]);
    }
    s.weights[k * R + r] = weight;
  }
  sum = warp_sum(sum);
  if (lane_id() == 0) s.max[r] = top, s.sum[r] = sum;
}

// weights . V of the rows; out(row, column, sum) for all columns of v_stride.
template <int DTYPE, int R, class Out>
__device__ __forceinline__ void value_partition(const Attention& a, const AttentionShared<R>& s, int partition,
                                                Out&& out) {
  constexpr int kElement = 16 / Piece<DTYPE>::kValues, kRows = R < 4 ? R : 4;  // rows whose sums fit the ring at once
  const int columns = a.kv.v_stride, row_bytes = columns * kElement;
  const int threads = columns / 8, slices = kAttentionThreads / threads;
  const int slice = static_cast<int>(threadIdx.x) / threads, column = static_cast<int>(threadIdx.x) % threads * 8;
  const int first = max(s.rows->first - partition * kPartition, 0);
  const int last = min(s.rows->last - partition * kPartition, kPartition);
  float acc[R][8] = {};
  if (slice < slices) {
    const int skipped = first > slice ? (first - slice + slices - 1) / slices : 0;
#pragma unroll 4
    for (int k = slice + skipped * slices; k < last; k += slices) {
      float v[8];
      load_values<DTYPE>(s.blocks[k / kKvBlock] + a.kv.v_offset + k % kKvBlock * row_bytes, column, v);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const float weight = s.weights[k * R + r];
#pragma unroll
        for (int i = 0; i < 8; ++i) acc[r][i] = fmaf(weight, v[i], acc[r][i]);
      }
    }
  }
  float* sums = reinterpret_cast<float*>(s.ring);
#pragma unroll
  for (int base = 0; base < R; base += kRows) {
    __syncthreads();
    if (slice < slices) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float* to = sums + (r * slices + slice) * columns + column;
#pragma unroll
        for (int i = 0; i < 8; i += 4)
          *reinterpret_cast<float4*>(to + i) =
              make_float4(acc[base + r][i], acc[base + r][i + 1], acc[base + r][i + 2], acc[base + r][i + 3]);
      }
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kRows * columns; i += kAttentionThreads) {
      const float* from = sums + i / columns * slices * columns + i % columns;
      float sum = from[0];
      for (int j = 1; j < slices; ++j) sum += from[j * columns];
      out(base + i / columns, i % columns, sum);
    }
  }
}

// Where the warp's block of the partition begins; nullptr: none of its keys is in [first_key, end_key).
__device__ __forceinline__ const uint8_t* block_of(const KvView& kv, const int32_t* table, int kv_head, int partition,
                                                   int first_key, int end_key) {
  const int first = partition * kPartition + warp_id() * kKvBlock;
  if (first >= end_key || first + kKvBlock <= first_key) return nullptr;
  return kv.base + int64_t{table[first / kKvBlock]} * kv.block_bytes + int64_t{kv_head} * kv.head_bytes;
}

// By a warp, [begin, end) of a block on its way to the L2.
__device__ __forceinline__ void ask_for(const uint8_t* block, int64_t begin, int64_t end) {
  if (!block) return;
  for (int64_t at = begin + lane_id() * 128; at < end; at += kWarp * 128) prefetch_l2(block + at);
}

// One partition. finish(row), by one thread, once s.max and s.sum of the row are known; then acc through `out`. All
// threads of the block.
template <int DTYPE, int R, class Finish, class Out>
__device__ __forceinline__ void attend_partition(const Attention& a, const AttentionShared<R>& s, const int32_t* table,
                                                 int kv_head, int partition, Finish&& finish, Out&& out) {
  __syncthreads();
  const uint8_t* block = block_of(a.kv, table, kv_head, partition, s.rows->first, s.rows->last);
  if (lane_id() == 0) s.blocks[warp_id()] = block;
  ask_for(block, a.kv.v_offset, a.kv.head_bytes);  // V, while K is computed with
  __syncthreads();
  score_partition<DTYPE, R>(a, s, partition);
  __syncthreads();
  if (warp_id() < R) {
    softmax_row<DTYPE, R>(a, s, partition, warp_id());
    if (lane_id() == 0) finish(warp_id());
  }
  __syncthreads();
  value_partition<DTYPE, R>(a, s, partition, out);
}

}  // namespace pe::cuda
