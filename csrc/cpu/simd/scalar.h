// The 16-lane trait in plain C++: the meaning of every operation, and what runs where no vector unit is known.
#pragma once

#include <cstdint>

#define PE_SCALAR_TRAIT

namespace {
namespace simd {

struct F {
  float v[16];
};
struct I {
  int32_t v[16];
};
struct B {
  uint8_t v[64];
};

constexpr int kTile = 4;
constexpr int kTilePanels = 1, kPairTile = 4;
constexpr int kFloatPanels = 2;
constexpr int kScoreRows = 2;
constexpr int kValueRows = 2;
constexpr int kValueColumns = 2;
constexpr int kByteRows = 1;
constexpr int kSelfPrefetched = 0;
constexpr int kAffineCandidates = 1;
constexpr int kScaleCandidates = 1;
constexpr bool kSignedBytes = false;
constexpr const char* kName = "scalar";

#define PE_LANES for (int i = 0; i < 16; ++i)
#define PE_MAP(T, expression)   \
  T r;                          \
  PE_LANES r.v[i] = expression; \
  return r

inline F set1(float x) { PE_MAP(F, x); }
inline F zero() { return set1(0.0f); }
inline F load(const float* p) { PE_MAP(F, p[i]); }
inline void store(float* p, F x) { PE_LANES p[i] = x.v[i]; }
inline F add(F a, F b) { PE_MAP(F, a.v[i] + b.v[i]); }
inline F sub(F a, F b) { PE_MAP(F, a.v[i] - b.v[i]); }
inline F mul(F a, F b) { PE_MAP(F, a.v[i] * b.v[i]); }
inline F div(F a, F b) { PE_MAP(F, a.v[i] / b.v[i]); }
inline F fma(F a, F b, F c) { PE_MAP(F, __builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
inline F max(F a, F b) { PE_MAP(F, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }  // b if either is NaN, as on x86
inline F min(F a, F b) { PE_MAP(F, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline F abs(F a) { PE_MAP(F, __builtin_fabsf(a.v[i])); }
inline F select_lt(F a, F b, F x, F y) { PE_MAP(F, a.v[i] < b.v[i] ? x.v[i] : y.v[i]); }

inline I iset1(int32_t x) { PE_MAP(I, x); }
inline I izero() { return iset1(0); }
inline I iload(const int32_t* p) { PE_MAP(I, p[i]); }
inline void istore(int32_t* p, I x) { PE_LANES p[i] = x.v[i]; }
inline I iadd(I a, I b) {
  PE_MAP(I, static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) + static_cast<uint32_t>(b.v[i])));
}
inline I ior(I a, I b) { PE_MAP(I, a.v[i] | b.v[i]); }
inline I iand(I a, I b) { PE_MAP(I, a.v[i] & b.v[i]); }
inline I imax(I a, I b) { PE_MAP(I, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline I imin(I a, I b) { PE_MAP(I, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
template <int N>
inline I shl(I a) {
  PE_MAP(I, static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) << N));
}
template <int N>
inline I shr(I a) {
  PE_MAP(I, static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) >> N));
}
inline I shift_right(I a, int64_t n) { PE_MAP(I, static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) >> n)); }
inline F to_float(I a) { PE_MAP(F, static_cast<float>(a.v[i])); }
inline I round_int(F a) {
  // out of range and NaN give INT32_MIN, as on x86
  PE_MAP(I, (a.v[i] >= -2147483648.0f && a.v[i] < 2147483648.0f) ? static_cast<int32_t>(__builtin_rintf(a.v[i]))
                                                                 : INT32_MIN);
}
inline F round_float(F a) { PE_MAP(F, __builtin_rintf(a.v[i])); }
inline F as_float(I a) {
  F r;
  __builtin_memcpy(&r, &a, sizeof r);
  return r;
}
inline I as_int(F a) {
  I r;
  __builtin_memcpy(&r, &a, sizeof r);
  return r;
}

inline void transpose(F* rows) {
  for (int r = 0; r < 16; ++r)
    for (int c = 0; c < r; ++c) {
      const float x = rows[r].v[c];
      rows[r].v[c] = rows[c].v[r];
      rows[c].v[r] = x;
    }
}
inline I iload_u16(const uint16_t* p) { PE_MAP(I, p[i]); }
inline F load_bf16(const uint16_t* p) {
  I r;
  PE_LANES r.v[i] = static_cast<int32_t>(static_cast<uint32_t>(p[i]) << 16);
  return as_float(r);
}
inline void store_high16(uint16_t* p, I a) {
  PE_LANES p[i] = static_cast<uint16_t>(static_cast<uint32_t>(a.v[i]) >> 16);
}
inline void store_low8(int8_t* p, I a) { PE_LANES p[i] = static_cast<int8_t>(a.v[i]); }

inline F load_i16(const int16_t* p) { PE_MAP(F, static_cast<float>(p[i])); }
inline F load_u8(const uint8_t* p) { PE_MAP(F, static_cast<float>(p[i])); }
inline F load_i8(const int8_t* p) { PE_MAP(F, static_cast<float>(p[i])); }

inline B bload(const uint8_t* p) {
  B r;
  __builtin_memcpy(&r, p, 64);
  return r;
}
inline void bstore(uint8_t* p, B x) { __builtin_memcpy(p, &x, 64); }
inline B low_nibbles(B b) {
  B r;
  for (int i = 0; i < 64; ++i) r.v[i] = b.v[i] & 15;
  return r;
}
inline B high_nibbles(B b) {
  B r;
  for (int i = 0; i < 64; ++i) r.v[i] = b.v[i] >> 4;
  return r;
}
inline I dot4_u4(I acc, B w, const int8_t* p) {
  PE_MAP(I, acc.v[i] + w.v[4 * i] * p[0] + w.v[4 * i + 1] * p[1] + w.v[4 * i + 2] * p[2] + w.v[4 * i + 3] * p[3]);
}
inline I dot4_u8(I acc, B w, const int8_t* p) { return dot4_u4(acc, w, p); }

inline void prefetch(const void*) {}
// The compiler takes x for changed, so that nothing computed from it leaves a loop.
template <class T>
inline void keep(T& x) {
  __asm__ volatile("" : "+m"(x));
}

#undef PE_MAP
#undef PE_LANES

}  // namespace simd
}  // namespace
