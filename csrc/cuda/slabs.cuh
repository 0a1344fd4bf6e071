// Activations of a block's product (linear.cuh) on their way into shared memory: a slab is what 64 columns of up to 8
// tokens come to.
#pragma once

#include "cuda/device.h"
#include "cuda/tile.h"

#ifdef __CUDACC__
#define PE_UNROLL_ALL _Pragma("unroll")
#else
#define PE_UNROLL_ALL
#endif

namespace pe::cuda {

constexpr int kWarps = 8, kBlockThreads = kWarps * kWarp;
constexpr int kSumStride = 20;  // floats from a token's 16 sums to the next one's: no two lanes in a bank

// Up to 8 rows of activations: row j is first + j or, by a list of rows of experts, index[first + j] / per_row.
struct Tokens {
  const int32_t* index = nullptr;
  int32_t per_row = 1;
  int64_t first = 0;
  int count = 0;
  __device__ __forceinline__ int64_t row(int j) const { return index ? index[first + j] / per_row : first + j; }
};

template <int FORMAT, int SUB, int R>
struct Sizes {
  static constexpr bool kFloat = is_float_format(FORMAT);
  static constexpr uint32_t kData = data_bytes(FORMAT);
  static constexpr uint32_t kTile = tile_bytes(FORMAT, SUB);
  static constexpr int kSlots = FORMAT == PE_F32 ? 2 : FORMAT == PE_BF16 ? 3 : FORMAT == PE_INT8 ? 5 : 9;  // of a ring
  static constexpr int kSlabs = (kSlots - 1 + R - 1) / R + 1;  // of activations; tiles of columns under way at once
  static constexpr uint32_t kRing = kSlots * kTile;
};

// Activations of a tile: float [count][64]; or int8 [count][64] and 5 words a token: scale, two sums, outlier, columns,
// each [count, rounded up to pairs].
__host__ __device__ constexpr int pair_stride(int count) { return (count + 1) / 2 * 2; }
template <bool FLOAT>
__host__ __device__ constexpr uint32_t slab_bytes(int count) {
  return FLOAT ? 256u * static_cast<uint32_t>(count)
               : static_cast<uint32_t>(64 * count + 20 * pair_stride(count) + 15) / 16u * 16u;
}

// Slabs of a warp: for all its tiles where that is little, and then the main loop loads nothing but weights.
constexpr uint32_t kStagedBytes = 24u << 10;
template <int FORMAT, int SUB, int R>
__host__ __device__ constexpr int slabs_of(int count, int k_tiles) {
  using S = Sizes<FORMAT, SUB, R>;
  const int all = (k_tiles + kWarps - 1) / kWarps;
  const bool staged = kWarps * static_cast<uint32_t>(all) * slab_bytes<S::kFloat>(count) <= kStagedBytes;
  return staged ? all : S::kSlabs;
}

// For up to so many tokens, of a matrix with so many tiles in a row; 0: any.
template <int FORMAT, int SUB, int R>
constexpr size_t shared_bytes(int tokens, int64_t k_tiles = 0) {
  using S = Sizes<FORMAT, SUB, R>;
  const size_t slab = size_t{kWarps} * slab_bytes<S::kFloat>(tokens), few = S::kSlabs * slab;
  const size_t all = static_cast<size_t>((k_tiles + kWarps - 1) / kWarps) * slab;
  const size_t staged = k_tiles && all < kStagedBytes ? all : kStagedBytes;
  const size_t loads = kWarps * S::kRing + (few > staged ? few : staged);
  const size_t sums = size_t{kWarps} * R * kFewTokens * kSumStride * sizeof(float);
  return loads > sums ? loads : sums;
}

// What a block may have on sm_86 and sm_89.
template <int FORMAT, int SUB, int R>
constexpr bool fits = shared_bytes<FORMAT, SUB, R>(kFewTokens) <= 99u << 10;

// What a lane copies of a tile of quantized activations: 16 bytes of q, one number, the word with the outlier's column.
// Chunks of 16 bytes of the rows 2, 3, 6, 7 are swapped in pairs, so that lanes read q without bank conflicts.
template <int FORMAT, int SUB>
struct QuantColumns {
  const int8_t* q;
  const void* numbers;
  const uint8_t* columns;
  int count, stride, number_step;

  __device__ __forceinline__ QuantColumns(const Rows& in, const Tokens& tokens)
      : count(tokens.count), stride(pair_stride(tokens.count)), number_step(1) {
    const QuantView& v = in.quant;
    const int lane = lane_id(), kind = lane / 8;
    q = v.q + tokens.row(min(lane / 4, count - 1)) * v.q_stride + 16 * (lane % 4);
    const int64_t row = tokens.row(min(lane % 8, count - 1)), g = row * v.groups;
    columns = v.outlier_column + row * v.outlier_stride;
    numbers = kind == 0 ? v.scale + g : v.outlier_value + g;
    if (kind == 1 || kind == 2) {
      const int64_t at = SUB == 32 ? 2 * g + kind - 1 : g;
      if (FORMAT == PE_INT4_MIN)
        numbers = (SUB == 32 ? v.scaled_sum32 : v.scaled_sum64) + at;
      else
        numbers = (SUB == 32 ? v.negative_sum32 : v.negative_sum64) + at;
      if (SUB == 32) number_step = 2;
    }
  }

  __device__ __forceinline__ void copy(int64_t k_tile, uint8_t* slab) const {
    const int lane = lane_id(), row = lane / 4, token = lane % 8, kind = lane / 8;
    if (row < count) copy_async16(slab + 64 * row + 16 * (lane % 4 ^ (row & 2)), q + k_tile * kTileColumns);
    uint8_t* words = slab + 64 * count;
    if (token >= count) return;
    if (SUB == 32 || kind != 2)
      copy_async4(words + 4 * (kind * stride + token), static_cast<const uint32_t*>(numbers) + k_tile * number_step);
    if (kind == 0) copy_async4(words + 4 * (4 * stride + token), columns + k_tile / 4 * 4);
  }
};

// Float activations; past K zeros, whatever the buffer holds there.
struct FloatColumns {
  const float* base;
  int64_t stride, cols;
  Tokens tokens;
  bool aligned;

  __device__ __forceinline__ FloatColumns(const Rows& in, const Tokens& t, int64_t cols)
      : base(in.f), stride(in.stride), cols(cols), tokens(t) {
    aligned = reinterpret_cast<uintptr_t>(base) % 16 == 0 && stride % 4 == 0;
  }

  __device__ __forceinline__ void copy(int64_t k_tile, uint8_t* slab) const {
    const bool whole = aligned && (k_tile + 1) * kTileColumns <= cols;
    for (int i = lane_id(); i < 16 * tokens.count; i += kWarp) {
      const int64_t k = k_tile * kTileColumns + 4 * (i % 16);
      const float* from = base + tokens.row(i / 16) * stride + k;
      float* to = reinterpret_cast<float*>(slab) + 4 * i;
      if (whole) {
        copy_async16(to, from);
      } else {
        for (int e = 0; e < 4; ++e) to[e] = k + e < cols ? from[e] : 0.0f;
      }
    }
  }
};

}  // namespace pe::cuda
