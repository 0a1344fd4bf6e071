// The GEMM of integer formats where the ISA multiplies matrices of bytes: simd::tile_sums gives the integer sums of a
// sub-block for kTileRows tokens at once. They are exact, and what follows them is what tile_int does, in its order, so
// the bits are the same.
#pragma once

namespace {

template <int FORMAT, int SUB>
void tile_tokens(const LinearArgs& a, const uint8_t* bytes, int64_t panel, int64_t token0, int64_t valid) {
  constexpr int T = simd::kTileRows;
  const Packed& w = *a.weight;
  const Scales<FORMAT> scales(w, panel);
  const int64_t subs = (w.cols + SUB - 1) / SUB, ratio = w.group / SUB, stride = a.quant.q_stride;
  const int64_t groups = a.quant.groups, sums = SUB == 64 ? groups : 2 * groups;
  const Act<SUB> act(a.quant, token0);
  F f[T], group[T];
  PE_UNROLL for (int j = 0; j < T; ++j) f[j] = group[j] = simd::zero();
  each_block<SUB>(subs, [&]<bool FIRST, bool LAST>(int64_t s) {
    const int64_t k0 = s * SUB, columns = imin64(SUB, w.padded_cols - k0);
    I acc[T];
    if (columns == SUB)
      simd::tile_sums<SUB>(acc, act.q + k0, stride, bytes + k0 * kPanel);
    else
      simd::tile_sums_rest(acc, act.q + k0, stride, bytes + k0 * kPanel, columns);
    const int64_t g = ratio == 1 ? s : s / ratio;
    const F factor = scales.factor(g);
    PE_UNROLL for (int j = 0; j < T; ++j) {
      const I sum = simd::iadd(acc[j], start_sum<FORMAT>(act.negative_sum + j * sums + s));
      const float* scale = act.scale + j * groups + s * SUB / kActGroup;
      add_block<FIRST, LAST>(f[j], group[j], sum, factor, scale);
    }
  });
  end_groups<FORMAT, SUB, T>(f, scales, a.quant, token0, ratio);
  PE_UNROLL for (int j = 0; j < T; ++j) if (j < valid)
      write_out(a, token0 + j, panel, add_outliers<FORMAT>(f[j], a, scales, panel, token0 + j));
}

template <int FORMAT, int SUB>
int64_t tile_panel(const LinearArgs& a, const uint8_t* bytes, int64_t panel) {
  constexpr int T = simd::kTileRows;
  // a tile reads rows past the last token; it may where the slack of the buffers has them
  const int64_t tokens = T <= kTileTokens ? a.tokens : a.tokens / T * T;
  if (tokens == 0) return 0;
  bytes = simd::tile_begin<SUB>(bytes, a.weight->padded_cols, a.scratch);
  for (int64_t t = 0; t < tokens; t += T) tile_tokens<FORMAT, SUB>(a, bytes, panel, t, tokens - t);
  simd::tile_end();
  return tokens;
}

}  // namespace
