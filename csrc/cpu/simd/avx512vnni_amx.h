// The 16-lane trait for AVX-512 with VNNI and AMX: that of avx512vnni.h, and tiles of bytes for the GEMM.
//
// The instructions are written out: the intrinsics of gcc 12 do not say which memory ldtilecfg and tileloadd read.
#pragma once

#define PE_TILES
#include "cpu/simd/avx512vnni.h"

namespace {
namespace simd {

constexpr const char* kName = "avx512vnni_amx";

struct TileConfig {  // the operand of ldtilecfg
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

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

}  // namespace simd
}  // namespace
