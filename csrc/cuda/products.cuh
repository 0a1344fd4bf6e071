// What a warp of a block's product (linear.cuh) adds up in registers, tile after tile.
#pragma once

#include "cuda/slabs.cuh"
#include "cuda/tile.cuh"

namespace pe::cuda {

// A whole number in the low bits of a float: 3 * 2^22 + x for |x| < 2^22. Conversions have a quarter of an addition's
// rate.
constexpr int32_t kIntegerBits = 0x4b400000;
constexpr float kIntegerBase = 12582912.0f;

template <int FORMAT>
struct Numbers {  // scales and minimums times kUnit, a power of two
  static constexpr bool kMinimum = FORMAT == PE_INT4_MIN;
  static constexpr float kUnit = kMinimum ? 0x1p-25f : 0x1p-35f;
  // 2^-2, or 2^-12, whose last bit is kUnit; less the offset of what is stored
  static constexpr uint32_t kBits = kMinimum ? 0x3e800000u : 0x39800000u;
  static constexpr float kBase = kMinimum ? 0x1p-2f : 0x1p-12f + 32768 * 0x1p-35f;
  static constexpr float kMinimumBase = 0x1p-2f + 128 * 0x1p-25f;

  __device__ static __forceinline__ float scale(uint32_t word, int half) {
    const uint32_t selector = kMinimum ? 0x7650u + 2u * static_cast<uint32_t>(half) : half ? 0x7632u : 0x7610u;
    return __uint_as_float(__byte_perm(word, kBits, selector)) - kBase;
  }
  __device__ static __forceinline__ float minimum(uint32_t word, int half) {
    return __uint_as_float(__byte_perm(word, kBits, 0x7651u + 2u * static_cast<uint32_t>(half))) - kMinimumBase;
  }
};

// Lane 4g + t has rows g and g + 8 of tokens 2t and 2t + 1: f[p][2h + u] of row g + 8h, token 2t + u.
template <int FORMAT, int SUB, int R>
struct IntegerProduct {
  static constexpr int kSubs = kTileColumns / SUB;
  static constexpr bool kMinimum = FORMAT == PE_INT4_MIN;
  static constexpr int kOffset = FORMAT == PE_INT8 ? 128 : FORMAT == PE_INT4_SYM ? 8 : 0;
  using N = Numbers<FORMAT>;

  float f[R][4], part[kMinimum ? R : 1][4];
  // of the tile's columns
  uint32_t b[2][2];
  float scale[2], sums[kSubs][2];
  int32_t start[kSubs][2];
  const uint32_t* words;
  unsigned outliers;
  // of the lane, in a slab
  int q_at[2], words_at, pair_at, column_at, stride, shift;  // shift: of the tile's byte in a word of outlier columns

  // Columns past the last token repeat it: nobody reads their sums.
  __device__ __forceinline__ explicit IntegerProduct(int count)
      : stride(pair_stride(count)), shift(8 * (warp_id() % 4)) {
    const int lane = lane_id(), g = min(lane / 4, count - 1), t = lane % 4;
    for (int m = 0; m < 2; ++m) q_at[m] = 64 * g + 16 * ((2 * m + t / 2) ^ (g & 2)) + 8 * (t % 2);
    pair_at = 64 * count + 4 * min(2 * t, stride - 2);
    column_at = lane < count ? 4 * stride + lane : -1;
    words_at = 64 * count;
    PE_UNROLL_ALL for (int p = 0; p < R; ++p) {
      PE_UNROLL_ALL for (int i = 0; i < 4; ++i) f[p][i] = part[kMinimum ? p : 0][i] = 0.0f;
    }
  }

  __device__ __forceinline__ void begin(const uint8_t* slab) {
    PE_UNROLL_ALL for (int m = 0; m < 2; ++m) {
      const uint2 v = *reinterpret_cast<const uint2*>(slab + q_at[m]);
      b[m][0] = v.x;
      b[m][1] = v.y;
    }
    words = reinterpret_cast<const uint32_t*>(slab + words_at);
    const uint8_t* pair = slab + pair_at;
    const float2 scales = *reinterpret_cast<const float2*>(pair);
    scale[0] = scales.x;
    scale[1] = scales.y;
    PE_UNROLL_ALL for (int s = 0; s < kSubs; ++s) {
      const uint2 sum = *reinterpret_cast<const uint2*>(pair + 4 * (1 + s) * stride);
      PE_UNROLL_ALL for (int u = 0; u < 2; ++u) {
        const uint32_t x = u ? sum.y : sum.x;
        sums[s][u] = __uint_as_float(x);
        start[s][u] = kIntegerBits + (kMinimum ? 0 : kOffset * static_cast<int32_t>(x));
      }
    }
    outliers = __ballot_sync(kAllLanes, column_at >= 0 && (words[max(column_at, 0)] >> shift & 255));
  }

  // The integer sums of the tile's sub-blocks.
  __device__ __forceinline__ void integers(const uint8_t* tile, int32_t (&d)[kSubs][4]) const {
    PE_UNROLL_ALL for (int s = 0; s < kSubs; ++s) {
      PE_UNROLL_ALL for (int i = 0; i < 4; ++i) d[s][i] = start[s][i % 2];
    }
    const uint4 w = *reinterpret_cast<const uint4*>(tile + 16 * lane_id());
    if constexpr (FORMAT == PE_INT8) {
      const uint4 w2 = *reinterpret_cast<const uint4*>(tile + 512 + 16 * lane_id());
      mma_u8s8(d[0], {w.x, w.y, w.z, w.w}, b[0]);
      mma_u8s8(d[kSubs - 1], {w2.x, w2.y, w2.z, w2.w}, b[1]);
    } else {
      constexpr uint32_t kLow = 0x0f0f0f0f;
      mma_u8s8(d[0], {w.x & kLow, w.y & kLow, w.z & kLow, w.w & kLow}, b[0]);
      mma_u8s8(d[kSubs - 1], {w.x >> 4 & kLow, w.y >> 4 & kLow, w.z >> 4 & kLow, w.w >> 4 & kLow}, b[1]);
    }
  }

  __device__ __forceinline__ void add_tile(int p, const uint8_t* tile) {
    int32_t d[kSubs][4];
    integers(tile, d);
    const auto* numbers = reinterpret_cast<const uint32_t*>(tile + data_bytes(FORMAT)) + lane_id() / 4 * kSubs;
    float group[4];
    PE_UNROLL_ALL for (int s = 0; s < kSubs; ++s) {
      const uint32_t word = numbers[s];
      PE_UNROLL_ALL for (int h = 0; h < 2; ++h) {
        const float factor = N::scale(word, h), minimum = kMinimum ? N::minimum(word, h) : 0.0f;
        PE_UNROLL_ALL for (int u = 0; u < 2; ++u) {
          const int i = 2 * h + u;
          const float sum = __int_as_float(d[s][i]) - kIntegerBase;
          group[i] = s ? fmaf(sum, factor, group[i]) : sum * factor;
          if (kMinimum) part[p][i] = fmaf(minimum, sums[s][u], part[p][i]);
        }
      }
    }
    PE_UNROLL_ALL for (int i = 0; i < 4; ++i) f[p][i] = fmaf(group[i], scale[i % 2], f[p][i]);
    if (outliers) add_outliers(p, tile);
  }

  // What quantize kept apart of these columns, the tokens one after the other. Selected, not branched to: so f stays in
  // registers.
  __device__ __forceinline__ void add_outliers(int p, const uint8_t* tile) {
    const int g = lane_id() / 4, t = lane_id() % 4;
    for (unsigned left = outliers; left; left &= left - 1) {
      const int token = __ffs(static_cast<int>(left)) - 1;
      const int c = static_cast<int>(words[4 * stride + token] >> shift & 255) - 1;
      const float value = __uint_as_float(words[3 * stride + token]);
      const uint32_t word = *reinterpret_cast<const uint32_t*>(tile + numbers_at(FORMAT, SUB, g, c));
      PE_UNROLL_ALL for (int h = 0; h < 2; ++h) {
        const float weight = static_cast<float>(integer_of(FORMAT, tile, g + 8 * h, c)) * N::scale(word, h);
        PE_UNROLL_ALL for (int u = 0; u < 2; ++u) {
          const bool mine = token == 2 * t + u;
          float& sum = f[p][2 * h + u];
          const float more = fmaf(weight, value, sum);
          sum = mine ? more : sum;
          if (!kMinimum) continue;
          float& rest = part[p][2 * h + u];
          const float more_rest = fmaf(N::minimum(word, h), value, rest);
          rest = mine ? more_rest : rest;
        }
      }
    }
  }

  // This warp's sums of panel p into sums[token][row].
  __device__ __forceinline__ void store(int p, const float* units, float* to) const {
    const int g = lane_id() / 4, t = lane_id() % 4;
    PE_UNROLL_ALL for (int i = 0; i < 4; ++i) {
      const int r = g + i / 2 * 8;
      float value = f[p][i] * units[r] * (1.0f / N::kUnit);
      if (kMinimum) value = fmaf(part[p][i] * units[kPanel + r], 1.0f / N::kUnit, value);
      to[(2 * t + i % 2) * kSumStride + r] = value;
    }
  }
};

// Lane r + 16h has row r and every other run of columns (4 of float32, 8 of bfloat16).
template <int FORMAT, int R>
struct FloatProduct {
  static constexpr int kRun = FORMAT == PE_F32 ? 4 : 8;
  float f[R][kFewTokens];
  const float* x;
  int count;

  __device__ __forceinline__ explicit FloatProduct(int tokens) : count(tokens) {
    PE_UNROLL_ALL for (int p = 0; p < R; ++p) { PE_UNROLL_ALL for (int j = 0; j < kFewTokens; ++j) f[p][j] = 0.0f; }
  }

  __device__ __forceinline__ void begin(const uint8_t* slab) { x = reinterpret_cast<const float*>(slab); }

  __device__ __forceinline__ static float weight(const uint4& v, int i) {
    const uint32_t word = (&v.x)[FORMAT == PE_F32 ? i : i / 2];
    return __uint_as_float(FORMAT == PE_F32 ? word : i % 2 ? word & 0xffff0000u : word << 16);
  }

  __device__ __forceinline__ void add_tile(int p, const uint8_t* tile) {
    const int lane = lane_id();
    PE_UNROLL_ALL for (int step = 0; step < kTileColumns / (2 * kRun); ++step) {
      const uint4 w = *reinterpret_cast<const uint4*>(tile + 512 * step + 16 * lane);
      const float* run = x + kRun * (2 * step + lane / 16);
      PE_UNROLL_ALL for (int j = 0; j < kFewTokens; ++j) {
        if (j >= count) break;
        PE_UNROLL_ALL for (int i = 0; i < kRun; i += 4) {
          const float4 a = *reinterpret_cast<const float4*>(run + j * kTileColumns + i);
          f[p][j] = fmaf(weight(w, i), a.x, f[p][j]);
          f[p][j] = fmaf(weight(w, i + 1), a.y, f[p][j]);
          f[p][j] = fmaf(weight(w, i + 2), a.z, f[p][j]);
          f[p][j] = fmaf(weight(w, i + 3), a.w, f[p][j]);
        }
      }
    }
  }

  __device__ __forceinline__ void store(int p, const float*, float* to) const {
    const int lane = lane_id();
    PE_UNROLL_ALL for (int j = 0; j < kFewTokens; ++j) {
      const float sum = f[p][j] + __shfl_xor_sync(kAllLanes, f[p][j], 16);
      if (lane < kPanel) to[j * kSumStride + lane] = sum;
    }
  }
};

}  // namespace pe::cuda
