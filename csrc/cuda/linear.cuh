// A block's part of a matrix times up to 8 rows of activations: what linear.cu, ffn.cu and the experts of moe.cu are
// made of. A block of 8 warps takes R neighbouring panels; warp w takes the tiles w, w + 8, w + 16 ... of K of all of
// them and adds them up in registers, ascending; at the end the 8 warps' sums are added in shared memory, ascending.
// Nothing of this depends on R or on the number of tokens, so neither do the bits of a row.
//
//   extern shared memory of shared_bytes<FORMAT, SUB, R>(most tokens), then in the kernel, by the whole block:
//     multiply<FORMAT, SUB, R>(m, panel, panels, in, tokens, shared_memory(), ready);
//     ... block_result<R>(shared_memory(), p, j, r) is row r of panel `panel + p` for token j ...
//     __syncthreads() before the next multiply
//
// m.tiles is read from panel `panel` on; panels (1 .. R) of them count. Tokens name rows of `in`, by a list where they
// are gathered. `ready()` is called when the first loads of weights are on their way and before anything else is read:
// it is where a kernel waits for the one in front (and does nothing where the choice of panels came from there
// already).
//
// Weights pass through a ring of tiles in shared memory, one a warp, so the main loop has no barrier of the block.
// Activations come with the first panel's tile of the same columns. int8 and int4: exact int32 sums in a sub-block,
// begun at -offset * sum of activations, then group = sum * number (+ ...), f = fma(group, act scale, f), as on the
// CPU; the units of the rows, times powers of two that keep f and the numbers near 1, are multiplied in at the end.
#pragma once

#include "cuda/device.h"
#include "cuda/tile.cuh"

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

// ---- activations into shared memory ---------------------------------------------------------------------------------

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

// ---- sums of a warp -------------------------------------------------------------------------------------------------

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

// ---- a block --------------------------------------------------------------------------------------------------------

// The sums of all tokens are left in shared memory: block_result.
template <int FORMAT, int SUB, int R, class Ready>
__device__ __forceinline__ void multiply(const Matrix& m, int64_t panel, int panels, const Rows& in,
                                         const Tokens& tokens, uint8_t* shared, Ready&& ready) {
  using S = Sizes<FORMAT, SUB, R>;
  constexpr bool kFloat = S::kFloat;
  static_assert(fits<FORMAT, SUB, R>);
  const int warp = warp_id(), lane = lane_id(), k_tiles = static_cast<int>(m.k_tiles);
  const int mine = warp < k_tiles ? (k_tiles - warp + kWarps - 1) / kWarps : 0;  // tiles of columns
  const uint32_t slab_size = slab_bytes<kFloat>(tokens.count);
  const int slabs = slabs_of<FORMAT, SUB, R>(tokens.count, k_tiles);
  uint8_t* const ring = shared + warp * S::kRing;
  uint8_t* const first_slab = shared + kWarps * S::kRing + static_cast<uint32_t>(warp * slabs) * slab_size;
  uint8_t* const end_slab = first_slab + static_cast<uint32_t>(slabs) * slab_size;
  constexpr int64_t kNext = int64_t{kWarps} * S::kTile;  // from a warp's tile to its next
  const int64_t panel_bytes = m.k_tiles * S::kTile;
  const uint8_t* source = m.tiles + panel * panel_bytes + warp * S::kTile + 16 * lane;
  const auto load = [&](const uint8_t* from, uint8_t* slot) {
    PE_UNROLL_ALL for (uint32_t at = 0; at < S::kTile; at += 512) {
      if (at + 512 <= S::kTile || at + 16 * static_cast<uint32_t>(lane) < S::kTile)
        copy_async16(slot + 16 * lane + at, from + at);
    }
  };
  PE_UNROLL_ALL for (int i = 0; i < S::kSlots - 1; ++i) {
    if (i / R < mine) load(source + i / R * kNext + min(i % R, panels - 1) * panel_bytes, ring + i * S::kTile);
    copy_async_commit();
  }
  ready();
  const auto columns = [&] {
    if constexpr (kFloat)
      return FloatColumns(in, tokens, m.cols);
    else
      return QuantColumns<FORMAT, SUB>(in, tokens);
  }();
  const int staged = slabs >= mine ? mine : (S::kSlots - 2) / R + 1;  // slabs that are loaded before the loop
  for (int j = 0; j < staged; ++j) columns.copy(warp + j * kWarps, first_slab + static_cast<uint32_t>(j) * slab_size);
  copy_async_commit();
  if (mine * R < S::kSlots) let_next_start();
  copy_async_wait<0>();

  const auto product_of = [&] {
    if constexpr (kFloat)
      return FloatProduct<FORMAT, R>(tokens.count);
    else
      return IntegerProduct<FORMAT, SUB, R>(tokens.count);
  };
  auto product = product_of();
  uint8_t *slot = ring, *free_slot = ring + (S::kSlots - 1) * S::kTile, *slab = first_slab;
  for (int j = 0; j < mine; ++j) {
    PE_UNROLL_ALL for (int p = 0; p < R; ++p) {
      copy_async_wait<S::kSlots - 2>();
      __syncwarp();  // all lanes' copies are there, and all lanes are done with the slot behind
      const int ahead = (p + S::kSlots - 1) / R, next_panel = (p + S::kSlots - 1) % R;
      if (j + ahead < mine) {
        load(source + ahead * kNext + min(next_panel, panels - 1) * panel_bytes, free_slot);
        if (next_panel == 0 && j + ahead >= staged) {
          uint8_t* to = slab + static_cast<uint32_t>(ahead) * slab_size;
          if (to >= end_slab) to -= static_cast<uint32_t>(slabs) * slab_size;
          columns.copy(warp + (j + ahead) * kWarps, to);
        }
        if (next_panel == R - 1 && j + ahead == mine - 1) let_next_start();
      }
      copy_async_commit();
      if (p == 0) product.begin(slab);
      product.add_tile(p, slot);
      free_slot = slot;
      slot += S::kTile;
      if (slot == ring + S::kRing) slot = ring;
    }
    source += kNext;
    slab += slab_size;
    if (slab == end_slab) slab = first_slab;
  }
  __syncthreads();  // the sums take the place of the rings
  const int units = FORMAT == PE_INT4_MIN ? 2 * kPanel : kPanel;
  PE_UNROLL_ALL for (int p = 0; p < R; ++p) {
    float* sums = reinterpret_cast<float*>(shared) + (warp * R + p) * (kFewTokens * kSumStride);
    product.store(p, kFloat ? nullptr : m.units + (panel + min(p, panels - 1)) * units, sums);
  }
  __syncthreads();
}

// Row r of panel p for token j, after `multiply`.
template <int R>
__device__ __forceinline__ float block_result(const uint8_t* shared, int p, int j, int r) {
  const float* sums = reinterpret_cast<const float*>(shared) + (p * kFewTokens + j) * kSumStride + r;
  float sum = sums[0];
  for (int w = 1; w < kWarps; ++w) sum += sums[w * R * kFewTokens * kSumStride];
  return sum;
}

// ---- launches -------------------------------------------------------------------------------------------------------

// body.operator()<FORMAT, SUB>() of a matrix.
template <class Body>
void with_format(const Matrix& m, Body&& body) {
  const bool halves = m.group == 32;
  switch (m.format) {
    case PE_F32: return body.template operator()<PE_F32, kTileColumns>();
    case PE_BF16: return body.template operator()<PE_BF16, kTileColumns>();
    case PE_INT8: return body.template operator()<PE_INT8, kTileColumns>();
    case PE_INT4_SYM:
      return halves ? body.template operator()<PE_INT4_SYM, 32>() : body.template operator()<PE_INT4_SYM, 64>();
    case PE_INT4_MIN:
      return halves ? body.template operator()<PE_INT4_MIN, 32>() : body.template operator()<PE_INT4_MIN, 64>();
    default: fail(PE_UNSUPPORTED, "a product with a matrix of format %s on CUDA", format_name(m.format));
  }
}

inline void check_activations(const Matrix& m, const Rows& in) {
  if (in.quantized == is_float_format(m.format))
    fail(PE_INTERNAL, "activations of a product with %s are %s", format_name(m.format),
         in.quantized ? "quantized" : "float32");
}

// More than 48 KB of shared memory must be asked for.
template <class Kernel>
void allow_shared(Kernel* kernel, size_t bytes) {
  if (bytes > (48u << 10))
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
          "shared memory");
}

inline unsigned chunks_of(int tokens) { return static_cast<unsigned>((tokens + kFewTokens - 1) / kFewTokens); }

}  // namespace pe::cuda
