// The 16-lane trait for AVX-512 with VNNI. The other ISAs have the same names and the same results, lane by lane.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {
namespace simd {

using F = __m512;   // 16 float
using I = __m512i;  // 16 int32
using B = __m512i;  // 64 bytes: lane r holds bytes 4 r .. 4 r + 3

constexpr int kTile = 12;        // tokens in a GEMM tile of one panel
constexpr int kTilePanels = 2;   // panels in a GEMM tile of integers
constexpr int kPairTile = 5;     // tokens in such a tile of two panels
constexpr int kFloatPanels = 4;  // the same for float weights, whose chains are longer
constexpr int kScoreRows = 6;    // query rows that share a load of K
constexpr int kValueRows = 6;    // query rows and 16-column groups that share a load of V
constexpr int kValueColumns = 4;
constexpr int kByteRows = 3;  // query rows that share a load of an int8 K or V: gcc doubles accumulators of dot4
// Tokens up to which the processor's own prefetchers keep ahead of the weights of a GEMV by themselves, and software
// prefetch only takes their place (Zen 4: a third of the bandwidth at one token). With more, what is computed between
// two loads holds them up (int4, 8 tokens, 2 threads: 1040 us without, 780 with, 720 from the cache).
constexpr int kSelfPrefetched = 2;
constexpr int kAffineCandidates = 5;  // candidates of the int4 search that share a pass over a group
constexpr int kScaleCandidates = 4;   // the same of symmetric int4 and of int8
constexpr bool kSignedBytes = false;  // dot4_u8 takes the stored byte (value + 128) and needs the sum correction
#ifndef PE_TILES
constexpr const char* kName = "avx512vnni";
#endif

inline F zero() { return _mm512_setzero_ps(); }
inline F set1(float x) { return _mm512_set1_ps(x); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F abs(F a) { return _mm512_abs_ps(a); }
// a < b ? x : y
inline F select_lt(F a, F b, F x, F y) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x); }

inline I izero() { return _mm512_setzero_si512(); }
inline I iset1(int32_t x) { return _mm512_set1_epi32(x); }
inline I iload(const int32_t* p) { return _mm512_loadu_si512(p); }
inline void istore(int32_t* p, I x) { _mm512_storeu_si512(p, x); }
inline I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
inline I ior(I a, I b) { return _mm512_or_si512(a, b); }
inline I iand(I a, I b) { return _mm512_and_si512(a, b); }
inline I imax(I a, I b) { return _mm512_max_epi32(a, b); }
inline I imin(I a, I b) { return _mm512_min_epi32(a, b); }
template <int N>
inline I shl(I a) {
  return _mm512_slli_epi32(a, N);
}
template <int N>
inline I shr(I a) {
  return _mm512_srli_epi32(a, N);
}  // logical
inline I shift_right(I a, int64_t n) { return _mm512_srl_epi32(a, _mm_cvtsi64_si128(n)); }
inline F to_float(I a) { return _mm512_cvtepi32_ps(a); }
inline I round_int(F a) { return _mm512_cvtps_epi32(a); }  // nearest even
inline F round_float(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F as_float(I a) { return _mm512_castsi512_ps(a); }
inline I as_int(F a) { return _mm512_castps_si512(a); }

// 16 rows of 16 columns, in place
inline void transpose(F* rows) {
  F t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int quad = 0; quad < 16; quad += 4)  // rows quad .. quad + 3 of column 4 lane + i, lane by lane of 128 bits
    for (int i = 0; i < 2; ++i) {
      rows[quad + 2 * i] = _mm512_shuffle_ps(t[quad + i], t[quad + 2 + i], 0x44);
      rows[quad + 2 * i + 1] = _mm512_shuffle_ps(t[quad + i], t[quad + 2 + i], 0xEE);
    }
  for (int i = 0; i < 4; ++i) {  // lanes of 4 rows -> columns of 16
    const F low02 = _mm512_shuffle_f32x4(rows[i], rows[i + 4], 0x88);
    const F low13 = _mm512_shuffle_f32x4(rows[i], rows[i + 4], 0xDD);
    const F high02 = _mm512_shuffle_f32x4(rows[i + 8], rows[i + 12], 0x88);
    const F high13 = _mm512_shuffle_f32x4(rows[i + 8], rows[i + 12], 0xDD);
    t[i] = _mm512_shuffle_f32x4(low02, high02, 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(low13, high13, 0x88);
    t[i + 8] = _mm512_shuffle_f32x4(low02, high02, 0xDD);
    t[i + 12] = _mm512_shuffle_f32x4(low13, high13, 0xDD);
  }
  for (int i = 0; i < 16; ++i) rows[i] = t[i];
}
inline I iload_u16(const uint16_t* p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// 16 bfloat16 <-> 16 float (the store truncates: round first)
inline F load_bf16(const uint16_t* p) { return as_float(shl<16>(iload_u16(p))); }
inline void store_high16(uint16_t* p, I a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(shr<16>(a)));
}
// low byte of each lane
inline void store_low8(int8_t* p, I a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a)); }

// 16 integers -> 16 float
inline F load_i16(const int16_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
inline F load_u8(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline F load_i8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

inline B bload(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void bstore(uint8_t* p, B x) { _mm512_storeu_si512(p, x); }
inline B low_nibbles(B b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
inline B high_nibbles(B b) { return _mm512_and_si512(_mm512_srli_epi16(b, 4), _mm512_set1_epi8(15)); }
// acc += sum over the 4 bytes of each lane of w * a, a = 4 int8 at p; w is unsigned: 0..15, or a stored int8 byte
inline I dot4_u4(I acc, B w, const int8_t* p) {
  int32_t a;
  __builtin_memcpy(&a, p, 4);
  return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(a));
}
inline I dot4_u8(I acc, B w, const int8_t* p) { return dot4_u4(acc, w, p); }

// Into the second level: prefetches into the first wait for its few miss buffers. Not the intrinsic: gcc takes a
// function that only prefetches for one without effect and drops its calls.
inline void prefetch(const void* p) { asm volatile("prefetcht1 %0" ::"m"(*static_cast<const char*>(p))); }
template <class T>
inline void keep(T& x) {
  __asm__ volatile("" : "+v"(x));
}

}  // namespace simd
}  // namespace
