// Linear layers over P16: GEMV for 1 to 8 tokens, GEMM above. Both add the same terms in the same order for every
// output, so that a token's result depends on neither the batch nor the path.
//
// Integer formats: inside a sub-block of SUB columns the sum is exact int32; between sub-blocks, ascending,
//   group = fma(float(acc), scale_w / kRange, group), from 0 for every group of activations,
//   f = fma(group, scale_a, f) at the end of each; then f * kRange. An acc stays below kRange, so that neither weights
//   nor activations near the largest float overflow;
// with minimums f += part, part = fma(minimum, scale_a * sum_a, part), ascending;
// at last the activations kept apart, ascending, as sub-blocks of one column whose scale is the value itself.
// Float formats: one fma chain per output, k ascending.
#pragma once

namespace {

constexpr float kRange = 1 << 20;      // 64 columns of 128 * 127 at most
constexpr int64_t kAhead = 12288;      // bytes of software prefetch in front of a GEMV
constexpr int64_t kAheadFloat = 8192;  // the same in front of each panel of float weights

template <int FORMAT>
struct Weights {  // FORMAT: PE_INT8, PE_INT4_SYM, PE_INT4_MIN
  static constexpr bool kBytes = FORMAT == PE_INT8;
  static constexpr int kColumns = kBytes ? 4 : 8;  // columns in a 64-byte step
  static constexpr bool kMinimum = FORMAT == PE_INT4_MIN;
};

// The start of a sub-block's integer sum: removes the offset that the stored bytes carry.
template <int FORMAT>
inline I start_sum(const int32_t* negative_sum) {
  if (FORMAT == PE_INT4_SYM) return simd::shl<3>(simd::iset1(*negative_sum));
  if (FORMAT == PE_INT8 && !simd::kSignedBytes) return simd::shl<7>(simd::iset1(*negative_sum));
  return simd::izero();
}

template <int FORMAT>
inline I dot4(I acc, simd::B w, const int8_t* a) {
  return FORMAT == PE_INT8 ? simd::dot4_u8(acc, w, a) : simd::dot4_u4(acc, w, a);
}

template <int SUB>
struct Act {  // the numbers of one row of activations, by sub-block
  const int8_t* q;
  const float* scale;
  const int32_t* negative_sum;
  Act() = default;
  Act(const QuantView& v, int64_t row)
      : q(v.q + row * v.q_stride),
        scale(v.scale + row * v.groups),
        negative_sum(SUB == 64 ? v.negative_sum64 + row * v.groups : v.negative_sum32 + 2 * row * v.groups) {}
};

template <int FORMAT>
struct Scales {  // of one panel: the stored numbers, times the units of its rows
  const uint8_t* scales;
  const int8_t* minimums;
  F scale_unit, factor_unit, minimum_unit;
  Scales() = default;
  Scales(const Packed& w, int64_t panel) {
    const uint8_t* base = w.data + panel * w.panel_bytes;
    scales = base + w.scale_offset;
    minimums = reinterpret_cast<const int8_t*>(base + w.minimum_offset);
    scale_unit = simd::load(reinterpret_cast<const float*>(base));
    factor_unit = simd::mul(scale_unit, simd::set1(1.0f / kRange));
    minimum_unit = simd::load(reinterpret_cast<const float*>(base) + (Weights<FORMAT>::kMinimum ? kPanel : 0));
  }
  F number(int64_t group) const {
    return Weights<FORMAT>::kMinimum ? simd::load_u8(scales + group * kPanel)
                                     : simd::load_i16(reinterpret_cast<const int16_t*>(scales) + group * kPanel);
  }
  F scale(int64_t group) const { return simd::mul(number(group), scale_unit); }
  F factor(int64_t group) const { return simd::mul(number(group), factor_unit); }  // scale / kRange
  F minimum(int64_t group) const { return simd::mul(simd::load_i8(minimums + group * kPanel), minimum_unit); }
};

// Calls block.operator()<FIRST, LAST>(s) for all sub-blocks: whether s is the first, the last of its group of
// activations.
template <int SUB, class Block>
__attribute__((always_inline)) inline void each_block(int64_t subs, Block&& block) {
  int64_t s = 0;
  if (SUB != kActGroup) {
    for (; s + 2 <= subs; s += 2) {
      block.template operator()<true, false>(s);
      block.template operator()<false, true>(s + 1);
    }
  }
  for (; s < subs; ++s) block.template operator()<true, true>(s);
}

// One sub-block's contribution to one output vector.
template <bool FIRST, bool LAST>
inline void add_block(F& f, F& group, I acc, F factor, const float* act_scale) {
  const F sum = simd::to_float(acc);
  group = FIRST ? simd::mul(sum, factor) : simd::fma(sum, factor, group);
  if (LAST) f = simd::fma(group, simd::set1(*act_scale), f);
}

// The part of the minimums for T rows of activations, over all groups of a panel.
template <int FORMAT, int SUB, int T>
inline void sum_minimums(F* part, const Scales<FORMAT>& scales, const QuantView& v, int64_t token0, int64_t ratio) {
  PE_UNROLL for (int j = 0; j < T; ++j) part[j] = simd::zero();
  if (!Weights<FORMAT>::kMinimum) return;
  const int64_t n = SUB == kActGroup ? v.groups : 2 * v.groups;
  const float* sums = (SUB == kActGroup ? v.scaled_sum64 : v.scaled_sum32) + token0 * n;
  for (int64_t g = 0; g < n; ++g) {  // where the last group has no second half its sum is 0
    const F minimum = scales.minimum(SUB == kActGroup ? g / ratio : g);
    PE_UNROLL for (int j = 0; j < T; ++j) part[j] = simd::fma(minimum, simd::set1(sums[j * n + g]), part[j]);
  }
}

// After all groups: f[0 .. T - 1] of a panel without the factor 1 / kRange, and the part of the minimums.
template <int T>
inline void end_groups(F* f, const F* part) {
  PE_UNROLL for (int j = 0; j < T; ++j) f[j] = simd::fma(f[j], simd::set1(kRange), part[j]);
}

template <int FORMAT, int SUB, int T>
inline void end_groups(F* f, const Scales<FORMAT>& scales, const QuantView& v, int64_t token0, int64_t ratio) {
  F part[T];
  sum_minimums<FORMAT, SUB, T>(part, scales, v, token0, ratio);
  end_groups<T>(f, part);
}

// Column k of a panel's weights as integers, the offset removed.
template <int FORMAT>
inline I weight_column(const uint8_t* data, int64_t k) {
  constexpr int kColumns = Weights<FORMAT>::kColumns;
  const I step = simd::iload(reinterpret_cast<const int32_t*>(data + k / kColumns * 64));
  if (FORMAT == PE_INT8)
    return simd::iadd(simd::iand(simd::shift_right(step, 8 * (k % 4)), simd::iset1(255)), simd::iset1(-128));
  const I q = simd::iand(simd::shift_right(step, 8 * (k % 4) + (k % 8 < 4 ? 0 : 4)), simd::iset1(15));
  return FORMAT == PE_INT4_SYM ? simd::iadd(q, simd::iset1(-8)) : q;
}

// Adds what quantize kept apart of one token's activations. The columns are read 8 groups at a time: most have none.
template <int FORMAT>
inline F add_outliers(F f, const LinearArgs& a, const Scales<FORMAT>& scales, int64_t panel, int64_t token) {
  const Packed& w = *a.weight;
  const QuantView& v = a.quant;
  const uint8_t* columns = v.outlier_column + token * v.outlier_stride;
  for (int64_t g = 0; g < v.groups; g += 8) {
    uint64_t word;
    __builtin_memcpy(&word, columns + g, 8);
    if (v.groups - g < 8) word &= (uint64_t{1} << (8 * (v.groups - g))) - 1;
    while (word) {
      const int byte = __builtin_ctzll(word) / 8;
      const int64_t k = (g + byte) * kActGroup + static_cast<int64_t>(word >> (8 * byte) & 255) - 1;
      word &= ~(uint64_t{255} << (8 * byte));
      const F value = simd::set1(v.outlier_value[token * v.groups + g + byte]);
      const I q = weight_column<FORMAT>(w.data + panel * w.panel_bytes + w.data_offset, k);
      const int64_t group = k / w.group;
      f = simd::fma(simd::to_float(q), simd::mul(scales.scale(group), value), f);
      if (Weights<FORMAT>::kMinimum) f = simd::fma(scales.minimum(group), value, f);
    }
  }
  return f;
}

inline void write_out(const LinearArgs& a, int64_t token, int64_t panel, F f) {
  if (a.bias) f = simd::add(f, simd::load(a.bias + panel * kPanel));
  float* out = a.out + token * a.out_stride + (panel - a.panel_begin) * kPanel;
  if (a.factor != 0.0f) f = simd::fma(f, simd::set1(a.factor), simd::load(out));
  simd::store(out, f);
}

// Reads the first bytes of a panel, a byte a line: the numbers in front of its data. The blocks use them bit by bit,
// far apart from the data: so they come in the order of memory instead, and all that a thread reads is one ascending
// stream, which the memory's own prefetchers follow without a pause (two panels side by side, or the numbers on demand,
// lost 15 to 40 % of the bandwidth).
inline void read_ahead(const Packed& w, int64_t panel, size_t bytes) {
  const uint8_t* base = w.data + panel * w.panel_bytes;
  for (size_t i = 0; i < bytes; i += 64) {
    static_cast<void>(*static_cast<const volatile uint8_t*>(base + i));
    simd::prefetch(base + i + kAhead);
  }
}

template <int FORMAT, int SUB, int M>
void gemv_int(const LinearArgs& a, int64_t panel) {
  using W = Weights<FORMAT>;
  constexpr int kChains = W::kBytes || M > 4 ? 1 : 2;
  const Packed& w = *a.weight;
  const int64_t subs = (w.cols + SUB - 1) / SUB, ratio = w.group / SUB;
  // For few tokens the minimums are summed as they come: read again after the data, from the second level and behind
  // the stream, they held it up (Zen 4, one thread: 10 to 35 % of the bandwidth).
  constexpr bool kMinimumsFirst = W::kMinimum && M <= simd::kSelfPrefetched;
  read_ahead(w, panel, kMinimumsFirst ? w.minimum_offset : w.data_offset);
  PE_UNROLL for (int m = 0; m < M; ++m) simd::prefetch(a.out + m * a.out_stride + (panel - a.panel_begin) * kPanel);
  const Scales<FORMAT> scales(w, panel);
  const uint8_t* data = w.data + panel * w.panel_bytes + w.data_offset;
  F part[M];
  if (kMinimumsFirst) sum_minimums<FORMAT, SUB, M>(part, scales, a.quant, 0, ratio);
  Act<SUB> act[M];
  F f[M], group[M];
  PE_UNROLL for (int m = 0; m < M; ++m) {
    act[m] = Act<SUB>(a.quant, m);
    f[m] = group[m] = simd::zero();
  }
  each_block<SUB>(subs, [&]<bool FIRST, bool LAST>(int64_t s) __attribute__((always_inline)) {
    const int64_t k0 = s * SUB, columns = imin64(SUB, w.padded_cols - k0);
    I acc[M][kChains];
    PE_UNROLL for (int m = 0; m < M; ++m) {
      acc[m][0] = start_sum<FORMAT>(act[m].negative_sum + s);
      if (kChains > 1) acc[m][kChains - 1] = simd::izero();
    }
    auto step = [&](int64_t k) __attribute__((always_inline)) {
      const simd::B b = simd::bload(data);
      if (M > simd::kSelfPrefetched) simd::prefetch(data + kAhead);
      data += 64;
      PE_UNROLL for (int m = 0; m < M; ++m) {
        if (W::kBytes) {
          acc[m][0] = dot4<FORMAT>(acc[m][0], b, act[m].q + k);
        } else {
          acc[m][0] = dot4<FORMAT>(acc[m][0], simd::low_nibbles(b), act[m].q + k);
          acc[m][kChains - 1] = dot4<FORMAT>(acc[m][kChains - 1], simd::high_nibbles(b), act[m].q + k + 4);
        }
      }
    };
    if (columns == SUB) {
      PE_UNROLL for (int i = 0; i < SUB / W::kColumns; ++i) step(k0 + i * W::kColumns);
    } else {
      for (int64_t i = 0; i < columns; i += W::kColumns) step(k0 + i);
    }
    const int64_t g = ratio == 1 ? s : s / ratio;
    const F factor = scales.factor(g);
    PE_UNROLL for (int m = 0; m < M; ++m) {
      const I sum = kChains > 1 ? simd::iadd(acc[m][0], acc[m][kChains - 1]) : acc[m][0];
      const float* scale = act[m].scale + s * SUB / kActGroup;
      add_block<FIRST, LAST>(f[m], group[m], sum, factor, scale);
    }
  });
  if (!kMinimumsFirst) sum_minimums<FORMAT, SUB, M>(part, scales, a.quant, 0, ratio);
  end_groups<M>(f, part);
  PE_UNROLL for (int m = 0; m < M; ++m) write_out(a, m, panel, add_outliers<FORMAT>(f[m], a, scales, panel, m));
}

// int4 panel -> one byte per weight, [padded_cols / 4][16][4]
inline void unpack_panel(const uint8_t* data, int64_t padded_cols, uint8_t* out) {
  for (int64_t k = 0; k < padded_cols; k += 8, data += 64, out += 128) {
    const simd::B b = simd::bload(data);
    simd::bstore(out, simd::low_nibbles(b));
    simd::bstore(out + 64, simd::high_nibbles(b));
  }
}

// T tokens from token0 by P panels, whose weights lie bytes_stride apart; rows past `valid` are computed on the
// buffer's slack and dropped. Two panels share the loads of the activations.
template <int FORMAT, int SUB, int T, int P>
void tile_int(const LinearArgs& a, const uint8_t* bytes, int64_t bytes_stride, int64_t panel, int64_t token0,
              int64_t valid) {
  const Packed& w = *a.weight;
  Scales<FORMAT> scales[P];
  PE_UNROLL for (int p = 0; p < P; ++p) scales[p] = Scales<FORMAT>(w, panel + p);
  const int64_t subs = (w.cols + SUB - 1) / SUB, ratio = w.group / SUB, stride = a.quant.q_stride;
  const int64_t groups = a.quant.groups, sums = SUB == 64 ? groups : 2 * groups;
  const Act<SUB> act(a.quant, token0);
  F f[P][T], group[P][T];
  PE_UNROLL for (int p = 0; p < P; ++p) PE_UNROLL for (int j = 0; j < T; ++j) f[p][j] = group[p][j] = simd::zero();
  const int8_t* row[T / 3 + 1];  // every third row: the two between are base + stride and base + 2 * stride
  each_block<SUB>(subs, [&]<bool FIRST, bool LAST>(int64_t s) __attribute__((always_inline)) {
    const int64_t k0 = s * SUB, columns = imin64(SUB, w.padded_cols - k0);
    PE_UNROLL for (int j = 0; j < T; j += 3) row[j / 3] = act.q + k0 + j * stride;
    I acc[P][T];
    PE_UNROLL for (int j = 0; j < T; ++j) {
      const I start = start_sum<FORMAT>(act.negative_sum + j * sums + s);
      PE_UNROLL for (int p = 0; p < P; ++p) acc[p][j] = start;
    }
    auto step = [&](int64_t k) __attribute__((always_inline)) {
      simd::B b[P];
      PE_UNROLL for (int p = 0; p < P; ++p) b[p] = simd::bload(bytes + p * bytes_stride + k * kPanel);
      PE_UNROLL for (int j = 0; j < T; ++j) PE_UNROLL for (int p = 0; p < P; ++p) acc[p][j] =
          dot4<FORMAT>(acc[p][j], b[p], row[j / 3] + (j % 3) * stride + k);
    };
    if (columns == SUB) {
      PE_UNROLL for (int i = 0; i < SUB / 4; ++i) step(4 * i);
    } else {
      for (int64_t i = 0; i < columns; i += 4) step(i);
    }
    bytes += columns * kPanel;
    const int64_t g = ratio == 1 ? s : s / ratio;
    PE_UNROLL for (int p = 0; p < P; ++p) {
      const F factor = scales[p].factor(g);
      PE_UNROLL for (int j = 0; j < T; ++j) {
        const float* scale = act.scale + j * groups + s * SUB / kActGroup;
        add_block<FIRST, LAST>(f[p][j], group[p][j], acc[p][j], factor, scale);
      }
    }
  });
  PE_UNROLL for (int p = 0; p < P; ++p) end_groups<FORMAT, SUB, T>(f[p], scales[p], a.quant, token0, ratio);
  PE_UNROLL for (int p = 0; p < P; ++p) PE_UNROLL for (int j = 0; j < T; ++j) if (j < valid)
      write_out(a, token0 + j, panel + p, add_outliers<FORMAT>(f[p][j], a, scales[p], panel + p, token0 + j));
}

template <int FORMAT>
inline void float_step(const uint8_t* data, int64_t k, F& even, F& odd) {
  if (FORMAT == PE_F32) {
    even = simd::load(reinterpret_cast<const float*>(data) + k * kPanel);
    odd = simd::load(reinterpret_cast<const float*>(data) + (k + 1) * kPanel);
  } else {
    const I pair = simd::iload(reinterpret_cast<const int32_t*>(data) + k / 2 * kPanel);
    even = simd::as_float(simd::shl<16>(pair));
    odd = simd::as_float(simd::iand(pair, simd::iset1(static_cast<int32_t>(0xffff0000))));
  }
}

// M tokens x P panels of float weights. Rows from token0; rows past `valid` are dropped.
template <int FORMAT, int M, int P>
void block_float(const LinearArgs& a, int64_t panel, int64_t token0, int64_t valid) {
  const Packed& w = *a.weight;
  const float* x = a.x + token0 * a.x_stride;
  const float* row[M / 3 + 1];
  PE_UNROLL for (int m = 0; m < M; m += 3) row[m / 3] = x + m * a.x_stride;
  const int64_t stride = a.x_stride;
  const uint8_t* data[P];
  F f[P][M];
  PE_UNROLL for (int p = 0; p < P; ++p) {
    data[p] = w.data + (panel + p) * w.panel_bytes + w.data_offset;
    PE_UNROLL for (int m = 0; m < M; ++m) f[p][m] = simd::zero();
  }
  const int64_t pairs = w.cols / 2 * 2;
  for (int64_t k = 0; k < pairs; k += 2) {
    PE_UNROLL for (int p = 0; p < P; ++p) {
      F even, odd;
      float_step<FORMAT>(data[p], k, even, odd);
      if (M > simd::kSelfPrefetched) simd::prefetch(data[p] + (FORMAT == PE_F32 ? 64 : 32) * k + kAheadFloat);
      PE_UNROLL for (int m = 0; m < M; ++m) f[p][m] =
          simd::fma(even, simd::set1(row[m / 3][(m % 3) * stride + k]), f[p][m]);
      PE_UNROLL for (int m = 0; m < M; ++m) f[p][m] =
          simd::fma(odd, simd::set1(row[m / 3][(m % 3) * stride + k + 1]), f[p][m]);
    }
  }
  if (w.cols % 2) {  // bfloat16 is padded to a pair, float32 is not, and the activations are not read past K
    PE_UNROLL for (int p = 0; p < P; ++p) {
      F even, odd;
      if (FORMAT == PE_F32)
        even = simd::load(reinterpret_cast<const float*>(data[p]) + pairs * kPanel);
      else
        float_step<FORMAT>(data[p], pairs, even, odd);
      PE_UNROLL for (int m = 0; m < M; ++m) f[p][m] =
          simd::fma(even, simd::set1(row[m / 3][(m % 3) * stride + pairs]), f[p][m]);
    }
  }
  PE_UNROLL for (int p = 0; p < P; ++p) PE_UNROLL for (int m = 0; m < M; ++m) if (m < valid)
      write_out(a, token0 + m, panel + p, f[p][m]);
}

template <int FORMAT, int SUB, int M>
void gemv_panels(const LinearArgs& a) {
  int64_t p = a.panel_begin;
  if constexpr (FORMAT == PE_F32 || FORMAT == PE_BF16) {  // several panels, because a float sum is one chain
    constexpr int P = M <= 2 ? simd::kFloatPanels : (M <= 4 ? (simd::kFloatPanels + 1) / 2 : 1);
    for (; p + P <= a.panel_end; p += P) block_float<FORMAT, M, P>(a, p, 0, M);
    for (; p < a.panel_end; ++p) block_float<FORMAT, M, 1>(a, p, 0, M);
  } else {
    for (; p < a.panel_end; ++p) gemv_int<FORMAT, SUB, M>(a, p);
  }
}

#ifdef PE_TILES
// As many of one panel's tokens as tiles take; returns their number. bytes: [padded_cols / 4][16][4]. In tiles-inl.h.
template <int FORMAT, int SUB>
int64_t tile_panel(const LinearArgs& a, const uint8_t* bytes, int64_t panel);
#endif

// All tokens by P panels, which are unpacked once.
template <int FORMAT, int SUB, int P>
void gemm_int(const LinearArgs& a, int64_t panel) {
  constexpr int T = P == 1 ? simd::kTile : simd::kPairTile;
  const Packed& w = *a.weight;
  const uint8_t* bytes = w.data + panel * w.panel_bytes + w.data_offset;
  int64_t stride = static_cast<int64_t>(w.panel_bytes), t = 0;
  if (FORMAT != PE_INT8) {
    stride = w.padded_cols * kPanel;
    for (int p = 0; p < P; ++p) unpack_panel(bytes + p * w.panel_bytes, w.padded_cols, a.scratch + p * stride);
    bytes = a.scratch;
  }
#ifdef PE_TILES
  t = tile_panel<FORMAT, SUB>(a, bytes, panel);
#endif
  for (; t < a.tokens; t += T) tile_int<FORMAT, SUB, T, P>(a, bytes, stride, panel, t, a.tokens - t);
}

template <int FORMAT>
void gemm_float(const LinearArgs& a, int64_t panel) {
  constexpr int T = simd::kTile, kSmall = 4;
  for (int64_t t = 0; t < a.tokens;) {
    const int64_t left = a.tokens - t;
    if (T > kSmall && left <= kSmall) {
      block_float<FORMAT, kSmall, 1>(a, panel, t, left);
      t += kSmall;
    } else {
      block_float<FORMAT, T, 1>(a, panel, t, left);
      t += T;
    }
  }
}

template <int FORMAT, int SUB>
void linear_format(const LinearArgs& a) {
  switch (a.tokens) {
    case 1: return gemv_panels<FORMAT, SUB, 1>(a);
    case 2: return gemv_panels<FORMAT, SUB, 2>(a);
    case 3: return gemv_panels<FORMAT, SUB, 3>(a);
    case 4: return gemv_panels<FORMAT, SUB, 4>(a);
    case 5: return gemv_panels<FORMAT, SUB, 5>(a);
    case 6: return gemv_panels<FORMAT, SUB, 6>(a);
    case 7: return gemv_panels<FORMAT, SUB, 7>(a);
    case 8: return gemv_panels<FORMAT, SUB, 8>(a);
    default: break;
  }
  int64_t p = a.panel_begin;
  if constexpr (FORMAT == PE_F32 || FORMAT == PE_BF16) {
    for (; p < a.panel_end; ++p) gemm_float<FORMAT>(a, p);
  } else {
#ifdef PE_TILES
    constexpr int P = 1;
#else
    constexpr int P = simd::kTilePanels;
#endif
    for (; p + P <= a.panel_end; p += P) gemm_int<FORMAT, SUB, P>(a, p);
    for (; p < a.panel_end; ++p) gemm_int<FORMAT, SUB, 1>(a, p);
  }
}

void linear(const LinearArgs* args) {
  const LinearArgs& a = *args;
  const bool half = a.weight->group == 32;
  switch (a.weight->format) {
    case PE_F32: return linear_format<PE_F32, 64>(a);
    case PE_BF16: return linear_format<PE_BF16, 64>(a);
    case PE_INT8: return linear_format<PE_INT8, 64>(a);
    case PE_INT4_SYM: return half ? linear_format<PE_INT4_SYM, 32>(a) : linear_format<PE_INT4_SYM, 64>(a);
    case PE_INT4_MIN: return half ? linear_format<PE_INT4_MIN, 32>(a) : linear_format<PE_INT4_MIN, 64>(a);
    default: return;
  }
}

}  // namespace
