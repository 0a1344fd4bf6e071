// The GEMM of integer formats on AMX tiles, for whole tiles of 16 tokens. The integer sums of a sub-block are exact,
// and what follows them is what tile_int does, in its order, so the bits are the same.
#pragma once

namespace {

constexpr int kTileRows = 16;  // tokens in a tile

// Tiles: 0 sums [16 tokens][16 rows], 1 activations [16][SUB], 2 weights [SUB / 4][16 rows][4]; 3 and 4 are 1 and 2 for
// the columns that are left at the end.
template <int SUB>
inline void configure_tiles(int64_t left) {
  simd::TileConfig config;
  const auto shape = [&](int tile, int64_t rows, int64_t bytes) {
    config.rows[tile] = static_cast<uint8_t>(rows);
    config.row_bytes[tile] = static_cast<uint16_t>(bytes);
  };
  shape(0, kTileRows, 4 * kPanel);
  shape(1, kTileRows, SUB);
  shape(2, SUB / 4, 4 * kPanel);
  if (left > 0) {
    shape(3, kTileRows, left);
    shape(4, left / 4, 4 * kPanel);
  }
  simd::tile_configure(config);
}

template <int FORMAT, int SUB>
void tile_sixteen(const LinearArgs& a, const uint8_t* bytes, int64_t panel, int64_t token0) {
  const Packed& w = *a.weight;
  const Scales<FORMAT> scales(w, panel);
  const int64_t subs = (w.cols + SUB - 1) / SUB, ratio = w.group / SUB, stride = a.quant.q_stride;
  const int64_t groups = a.quant.groups, sums = SUB == 64 ? groups : 2 * groups;
  const Act<SUB> act(a.quant, token0);
  alignas(64) int32_t products[kTileRows * kPanel];
  F f[kTileRows];
  PE_UNROLL for (int j = 0; j < kTileRows; ++j) f[j] = simd::zero();
  for (int64_t s = 0; s < subs; ++s) {
    const int64_t k0 = s * SUB;
    simd::tile_zero<0>();
    if (w.padded_cols - k0 >= SUB) {
      simd::tile_load<1>(act.q + k0, stride);
      simd::tile_load<2>(bytes + k0 * kPanel, 4 * kPanel);
      simd::tile_dot<0, 1, 2>();
    } else {
      simd::tile_load<3>(act.q + k0, stride);
      simd::tile_load<4>(bytes + k0 * kPanel, 4 * kPanel);
      simd::tile_dot<0, 3, 4>();
    }
    simd::tile_store<0>(products, 4 * kPanel);
    const int64_t g = ratio == 1 ? s : s / ratio;
    const F scale = scales.scale(g), minimum = scales.minimum(g);
    PE_UNROLL for (int j = 0; j < kTileRows; ++j) {
      const I sum = simd::iadd(simd::iload(products + j * kPanel), start_sum<FORMAT>(act.negative_sum + j * sums + s));
      f[j] = add_block<FORMAT, SUB>(f[j], sum, scale, minimum, act.scale + j * groups, act.scaled_sum + j * sums, s);
    }
  }
  PE_UNROLL for (int j = 0; j < kTileRows; ++j)
      write_out(a, token0 + j, panel, add_outliers<FORMAT>(f[j], a, scales, panel, token0 + j));
}

template <int FORMAT, int SUB>
int64_t tile_panel(const LinearArgs& a, const uint8_t* bytes, int64_t panel) {
  const int64_t whole = a.tokens / kTileRows * kTileRows;
  if (whole == 0) return 0;
  configure_tiles<SUB>(a.weight->padded_cols % SUB);
  for (int64_t t = 0; t < whole; t += kTileRows) tile_sixteen<FORMAT, SUB>(a, bytes, panel, t);
  simd::tile_release();
  return whole;
}

}  // namespace
