// The 16-lane trait for AVX2 with FMA: two halves of 8 lanes. avxvnni.h is the same but for the dot product, an
// instruction there: PE_DPBUSD_256 names the intrinsic.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {
namespace simd {

struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};
using B = I;

constexpr int kTile = 4;
constexpr int kTilePanels = 1, kPairTile = 4;
constexpr int kFloatPanels = 2;
constexpr int kScoreRows = 2;
constexpr int kValueRows = 2;
constexpr int kValueColumns = 2;
constexpr int kByteRows = 1;
constexpr int kSelfPrefetched = 1;  // Zen 4, one thread: bf16 and int8 +10 to 25 %, int4 with minimums +7
constexpr int kAffineCandidates = 1;
constexpr int kScaleCandidates = 1;

inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F abs(F x) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
}
inline F select_lt(F p, F q, F x, F y) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(p.a, q.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(p.b, q.b, _CMP_LT_OQ))};
}

inline I izero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline I iset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I bload(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
inline void bstore(uint8_t* p, I x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), x.b);
}
inline I iload(const int32_t* p) { return bload(reinterpret_cast<const uint8_t*>(p)); }
inline void istore(int32_t* p, I x) { bstore(reinterpret_cast<uint8_t*>(p), x); }
inline I iadd(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I ior(I x, I y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline I iand(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline I imax(I x, I y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
inline I imin(I x, I y) { return {_mm256_min_epi32(x.a, y.a), _mm256_min_epi32(x.b, y.b)}; }
template <int N>
inline I shl(I x) {
  return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)};
}
template <int N>
inline I shr(I x) {
  return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)};
}
inline I shift_right(I x, int64_t n) {
  const __m128i count = _mm_cvtsi64_si128(n);
  return {_mm256_srl_epi32(x.a, count), _mm256_srl_epi32(x.b, count)};
}
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I round_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline F round_float(F x) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, kNearest), _mm256_round_ps(x.b, kNearest)};
}
inline F as_float(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline I as_int(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }

// 8 rows of 8 columns in place
inline void transpose8(__m256* r) {
  __m256 t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int half = 0; half < 8; half += 4)
    for (int i = 0; i < 2; ++i) {
      r[half + 2 * i] = _mm256_shuffle_ps(t[half + i], t[half + 2 + i], 0x44);
      r[half + 2 * i + 1] = _mm256_shuffle_ps(t[half + i], t[half + 2 + i], 0xEE);
    }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
  }
  for (int i = 0; i < 8; ++i) r[i] = t[i];
}
inline void transpose(F* rows) {
  __m256 quarter[4][8];
  for (int i = 0; i < 8; ++i) {
    quarter[0][i] = rows[i].a;
    quarter[1][i] = rows[i].b;
    quarter[2][i] = rows[i + 8].a;
    quarter[3][i] = rows[i + 8].b;
  }
  for (auto& q : quarter) transpose8(q);
  for (int i = 0; i < 8; ++i) {
    rows[i] = {quarter[0][i], quarter[2][i]};
    rows[i + 8] = {quarter[1][i], quarter[3][i]};
  }
}
inline I iload_u16(const uint16_t* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), _mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1))};
}
inline F load_bf16(const uint16_t* p) { return as_float(shl<16>(iload_u16(p))); }
inline void store_high16(uint16_t* p, I x) {
  const I s = shr<16>(x);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(s.a, s.b), 0xD8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
}
inline void store_low8(int8_t* p, I x) {
  const __m256i pick = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12, -1,
                                        -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i first = _mm256_shuffle_epi8(x.a, pick), second = _mm256_shuffle_epi8(x.b, pick);
  const __m128i quads = _mm_setr_epi32(_mm256_extract_epi32(first, 0), _mm256_extract_epi32(first, 4),
                                       _mm256_extract_epi32(second, 0), _mm256_extract_epi32(second, 4));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), quads);
}

inline F load_i16(const int16_t* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return to_float({_mm256_cvtepi16_epi32(_mm_loadu_si128(q)), _mm256_cvtepi16_epi32(_mm_loadu_si128(q + 1))});
}
inline F load_u8(const uint8_t* p) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return to_float({_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))});
}
inline F load_i8(const int8_t* p) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return to_float({_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))});
}

inline B low_nibbles(B x) {
  const __m256i m = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
inline B high_nibbles(B x) {
  const __m256i m = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(x.a, 4), m), _mm256_and_si256(_mm256_srli_epi16(x.b, 4), m)};
}
#ifdef PE_DPBUSD_256
constexpr bool kSignedBytes = false;
inline I dot4_u4(I acc, B w, const int8_t* p) {
  int32_t a;
  __builtin_memcpy(&a, p, 4);
  const __m256i x = _mm256_set1_epi32(a);
  return {PE_DPBUSD_256(acc.a, w.a, x), PE_DPBUSD_256(acc.b, w.b, x)};
}
inline I dot4_u8(I acc, B w, const int8_t* p) { return dot4_u4(acc, w, p); }
#else
constexpr const char* kName = "avx2";
constexpr bool kSignedBytes = true;  // dot4_u8 removes the 128 itself: vpmaddubsw would saturate on the stored byte
inline I dot4_u4(I acc, B w, const int8_t* p) {
  int32_t a;
  __builtin_memcpy(&a, p, 4);
  const __m256i x = _mm256_set1_epi32(a), ones = _mm256_set1_epi16(1);
  return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(_mm256_maddubs_epi16(w.a, x), ones)),
          _mm256_add_epi32(acc.b, _mm256_madd_epi16(_mm256_maddubs_epi16(w.b, x), ones))};
}
inline I dot4_u8(I acc, B w, const int8_t* p) {
  int32_t a;
  __builtin_memcpy(&a, p, 4);
  const __m256i x = _mm256_set1_epi32(a), ones = _mm256_set1_epi16(1), flip = _mm256_set1_epi8(-128);
  const __m256i wa = _mm256_xor_si256(w.a, flip), wb = _mm256_xor_si256(w.b, flip);
  const __m256i pa = _mm256_maddubs_epi16(_mm256_abs_epi8(wa), _mm256_sign_epi8(x, wa));
  const __m256i pb = _mm256_maddubs_epi16(_mm256_abs_epi8(wb), _mm256_sign_epi8(x, wb));
  return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(pa, ones)), _mm256_add_epi32(acc.b, _mm256_madd_epi16(pb, ones))};
}
#endif

// Into the second level: prefetches into the first wait for its few miss buffers. Not the intrinsic: gcc takes a
// function that only prefetches for one without effect and drops its calls.
inline void prefetch(const void* p) { asm volatile("prefetcht1 %0" ::"m"(*static_cast<const char*>(p))); }
template <class T>
inline void keep(T& x) {
  __asm__ volatile("" : "+x"(x.a), "+x"(x.b));
}

}  // namespace simd
}  // namespace
