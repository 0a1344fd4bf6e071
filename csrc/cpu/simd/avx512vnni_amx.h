// The 16-lane trait for AVX-512 with VNNI and AMX: that of avx512vnni.h, and tiles of bytes for the GEMM.
//
// The instructions are written out: the intrinsics of gcc 12 do not say which memory ldtilecfg and tileloadd read.
#pragma once

#define PE_TILES
#include "cpu/simd/avx512vnni.h"

namespace {
namespace simd {

struct TileConfig {  // the operand of ldtilecfg
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

#ifdef PE_TILE_EMULATION
#include PE_TILE_EMULATION
#else
constexpr const char* kName = "avx512vnni_amx";

inline void tile_configure(const TileConfig& config) { __asm__ __volatile__("ldtilecfg %0" : : "m"(config)); }
inline void tile_release() { __asm__ __volatile__("tilerelease"); }
// Tile N: rows at p, p + stride ... of the size configured for N.
template <int N>
inline void tile_load(const void* p, int64_t stride) {
  __asm__ __volatile__("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(N) : "memory");
}
template <int N>
inline void tile_store(void* p, int64_t stride) {
  __asm__ __volatile__("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(N) : "memory");
}
template <int N>
inline void tile_zero() {
  __asm__ __volatile__("tilezero %%tmm%c0" : : "i"(N));
}
// C[m][n] += sum over k, j of A[m][4 k + j] * B[k][4 n + j]: A int8, B uint8, C int32
template <int C, int A, int B>
inline void tile_dot() {
  __asm__ __volatile__("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
#endif

constexpr int kTileRows = 16;  // tokens that tile_sums takes at once

// Tiles: 0 sums [16 tokens][16 rows], 1 activations [16][SUB], 2 weights [SUB / 4][16 rows][4]; 3 and 4 are 1 and 2 for
// the columns that are left at the end. Returns the weights as tile_sums reads them: [padded_cols / 4][16][4] as given.
template <int SUB>
inline const uint8_t* tile_begin(const uint8_t* bytes, int64_t padded_cols, uint8_t*) {
  TileConfig config;
  const auto shape = [&](int tile, int64_t rows, int64_t row_bytes) {
    config.rows[tile] = static_cast<uint8_t>(rows);
    config.row_bytes[tile] = static_cast<uint16_t>(row_bytes);
  };
  shape(0, kTileRows, 64);
  shape(1, kTileRows, SUB);
  shape(2, SUB / 4, 64);
  if (const int64_t left = padded_cols % SUB; left > 0) {
    shape(3, kTileRows, left);
    shape(4, left / 4, 64);
  }
  tile_configure(config);
  return bytes;
}
inline void tile_end() { tile_release(); }

template <int A, int B>
inline void tile_product(I* sums, const int8_t* q, int64_t stride, const uint8_t* bytes) {
  alignas(64) int32_t products[kTileRows * 16];
  tile_zero<0>();
  tile_load<A>(q, stride);
  tile_load<B>(bytes, 64);
  tile_dot<0, A, B>();
  tile_store<0>(products, 64);
  for (int j = 0; j < kTileRows; ++j) sums[j] = iload(products + 16 * j);
}
// sums[j], lane r = sum over SUB columns of the stored byte of row r times the activation of token j at q + j * stride
template <int SUB>
inline void tile_sums(I* sums, const int8_t* q, int64_t stride, const uint8_t* bytes) {
  tile_product<1, 2>(sums, q, stride, bytes);
}
inline void tile_sums_rest(I* sums, const int8_t* q, int64_t stride, const uint8_t* bytes, int64_t) {
  tile_product<3, 4>(sums, q, stride, bytes);
}

}  // namespace simd
}  // namespace
