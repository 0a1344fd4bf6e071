// The 16-lane trait for aarch64: four registers of 4 lanes. One source for three ISAs, which differ in their dot
// product of 4 bytes and are told apart by the features their object is compiled for: neon (ARMv8-A), neon_dotprod,
// neon_i8mm.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace {
namespace simd {

struct F {
  float32x4_t a, b, c, d;
};
struct I {
  int32x4_t a, b, c, d;
};
struct B {
  uint8x16_t a, b, c, d;
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

#define PE_QUARTERS _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i)
#define PE_ROW_PAIRS _Pragma("GCC unroll 8") for (int i = 0; i < 8; ++i)
#define PE_TOKEN_PAIRS _Pragma("GCC unroll 2") for (int i = 0; i < 2; ++i)

// The same function on every quarter of x, of x and y, or of x and a constant.
#define PE_MAP1(T, f) \
  return T { f(x.a), f(x.b), f(x.c), f(x.d) }
#define PE_MAP2(T, f) \
  return T { f(x.a, y.a), f(x.b, y.b), f(x.c, y.c), f(x.d, y.d) }
#define PE_MAPN(T, f, n) \
  return T { f(x.a, n), f(x.b, n), f(x.c, n), f(x.d, n) }
#define PE_LOAD(T, f, p, step) \
  return T { f(p), f(p + step), f(p + 2 * step), f(p + 3 * step) }

inline F set1(float x) {
  const float32x4_t v = vdupq_n_f32(x);
  return {v, v, v, v};
}
inline F zero() { return set1(0.0f); }
inline F load(const float* p) { PE_LOAD(F, vld1q_f32, p, 4); }
inline void store(float* p, F x) {
  vst1q_f32(p, x.a);
  vst1q_f32(p + 4, x.b);
  vst1q_f32(p + 8, x.c);
  vst1q_f32(p + 12, x.d);
}
inline F add(F x, F y) { PE_MAP2(F, vaddq_f32); }
inline F sub(F x, F y) { PE_MAP2(F, vsubq_f32); }
inline F mul(F x, F y) { PE_MAP2(F, vmulq_f32); }
inline F div(F x, F y) { PE_MAP2(F, vdivq_f32); }
inline F fma(F x, F y, F z) {
  return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)};
}
inline F select_lt(F p, F q, F x, F y) {
  return {vbslq_f32(vcltq_f32(p.a, q.a), x.a, y.a), vbslq_f32(vcltq_f32(p.b, q.b), x.b, y.b),
          vbslq_f32(vcltq_f32(p.c, q.c), x.c, y.c), vbslq_f32(vcltq_f32(p.d, q.d), x.d, y.d)};
}
// vmaxq_f32 would give NaN if either is NaN; the other ISAs give y
inline F max(F x, F y) { return select_lt(y, x, x, y); }
inline F min(F x, F y) { return select_lt(x, y, x, y); }
inline F abs(F x) { PE_MAP1(F, vabsq_f32); }

inline I iset1(int32_t x) {
  const int32x4_t v = vdupq_n_s32(x);
  return {v, v, v, v};
}
inline I izero() { return iset1(0); }
inline I iload(const int32_t* p) { PE_LOAD(I, vld1q_s32, p, 4); }
inline void istore(int32_t* p, I x) {
  vst1q_s32(p, x.a);
  vst1q_s32(p + 4, x.b);
  vst1q_s32(p + 8, x.c);
  vst1q_s32(p + 12, x.d);
}
inline I iadd(I x, I y) { PE_MAP2(I, vaddq_s32); }
inline I ior(I x, I y) { PE_MAP2(I, vorrq_s32); }
inline I iand(I x, I y) { PE_MAP2(I, vandq_s32); }
inline I imax(I x, I y) { PE_MAP2(I, vmaxq_s32); }
inline I imin(I x, I y) { PE_MAP2(I, vminq_s32); }
template <int N>
inline I shl(I x) {
  PE_MAPN(I, vshlq_n_s32, N);
}
template <int N>
inline int32x4_t shr4(int32x4_t x) {
  return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(x), N));
}
template <int N>
inline I shr(I x) {
  PE_MAP1(I, shr4<N>);
}
inline int32x4_t shift_right4(int32x4_t x, int32x4_t left) {
  return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(x), left));
}
inline I shift_right(I x, int64_t n) {
  const int32x4_t left = vdupq_n_s32(static_cast<int32_t>(-n));
  PE_MAPN(I, shift_right4, left);
}
inline F to_float(I x) { PE_MAP1(F, vcvtq_f32_s32); }
// fcvtns saturates and makes NaN 0; out of range and NaN give INT32_MIN, as on x86
inline int32x4_t round_int4(float32x4_t x) {
  return vbslq_s32(vcltq_f32(x, vdupq_n_f32(2147483648.0f)), vcvtnq_s32_f32(x), vdupq_n_s32(INT32_MIN));
}
inline I round_int(F x) { PE_MAP1(I, round_int4); }
inline F round_float(F x) { PE_MAP1(F, vrndnq_f32); }
inline F as_float(I x) { PE_MAP1(F, vreinterpretq_f32_s32); }
inline I as_int(F x) { PE_MAP1(I, vreinterpretq_s32_f32); }

inline I widen_u16(uint16x8_t x, uint16x8_t y) {
  return {vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(x))), vreinterpretq_s32_u32(vmovl_high_u16(x)),
          vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(y))), vreinterpretq_s32_u32(vmovl_high_u16(y))};
}
inline I widen_s16(int16x8_t x, int16x8_t y) {
  return {vmovl_s16(vget_low_s16(x)), vmovl_high_s16(x), vmovl_s16(vget_low_s16(y)), vmovl_high_s16(y)};
}
// 4 rows of 4 columns at r, r + step, ... in place
inline void transpose4(float32x4_t& p, float32x4_t& q, float32x4_t& r, float32x4_t& s) {
  const float64x2_t a = vreinterpretq_f64_f32(vtrn1q_f32(p, q)), b = vreinterpretq_f64_f32(vtrn2q_f32(p, q));
  const float64x2_t c = vreinterpretq_f64_f32(vtrn1q_f32(r, s)), d = vreinterpretq_f64_f32(vtrn2q_f32(r, s));
  p = vreinterpretq_f32_f64(vzip1q_f64(a, c));
  q = vreinterpretq_f32_f64(vzip1q_f64(b, d));
  r = vreinterpretq_f32_f64(vzip2q_f64(a, c));
  s = vreinterpretq_f32_f64(vzip2q_f64(b, d));
}
inline void swap4(float32x4_t& x, float32x4_t& y) {
  const float32x4_t t = x;
  x = y;
  y = t;
}
// 16 rows of 16 columns in place: the 4 x 4 blocks, then the blocks across the diagonal
inline void transpose(F* rows) {
  for (int i = 0; i < 16; i += 4) {
    F *p = rows + i, *q = p + 1, *r = p + 2, *s = p + 3;
    transpose4(p->a, q->a, r->a, s->a);
    transpose4(p->b, q->b, r->b, s->b);
    transpose4(p->c, q->c, r->c, s->c);
    transpose4(p->d, q->d, r->d, s->d);
  }
  for (int i = 0; i < 4; ++i) {
    swap4(rows[i].b, rows[4 + i].a);
    swap4(rows[i].c, rows[8 + i].a);
    swap4(rows[i].d, rows[12 + i].a);
    swap4(rows[4 + i].c, rows[8 + i].b);
    swap4(rows[4 + i].d, rows[12 + i].b);
    swap4(rows[8 + i].d, rows[12 + i].c);
  }
}
inline I iload_u16(const uint16_t* p) { return widen_u16(vld1q_u16(p), vld1q_u16(p + 8)); }
inline F load_bf16(const uint16_t* p) { return as_float(shl<16>(iload_u16(p))); }
inline void store_high16(uint16_t* p, I x) {
  const uint32x4_t a = vreinterpretq_u32_s32(x.a), b = vreinterpretq_u32_s32(x.b);
  const uint32x4_t c = vreinterpretq_u32_s32(x.c), d = vreinterpretq_u32_s32(x.d);
  vst1q_u16(p, vshrn_high_n_u32(vshrn_n_u32(a, 16), b, 16));
  vst1q_u16(p + 8, vshrn_high_n_u32(vshrn_n_u32(c, 16), d, 16));
}
inline void store_low8(int8_t* p, I x) {
  const int16x8_t first = vmovn_high_s32(vmovn_s32(x.a), x.b), second = vmovn_high_s32(vmovn_s32(x.c), x.d);
  vst1q_s8(p, vmovn_high_s16(vmovn_s16(first), second));
}

inline F load_i16(const int16_t* p) { return to_float(widen_s16(vld1q_s16(p), vld1q_s16(p + 8))); }
inline F load_u8(const uint8_t* p) {
  const uint8x16_t x = vld1q_u8(p);
  return to_float(widen_u16(vmovl_u8(vget_low_u8(x)), vmovl_high_u8(x)));
}
inline F load_i8(const int8_t* p) {
  const int8x16_t x = vld1q_s8(p);
  return to_float(widen_s16(vmovl_s8(vget_low_s8(x)), vmovl_high_s8(x)));
}

inline B bload(const uint8_t* p) { PE_LOAD(B, vld1q_u8, p, 16); }
inline void bstore(uint8_t* p, B x) {
  vst1q_u8(p, x.a);
  vst1q_u8(p + 16, x.b);
  vst1q_u8(p + 32, x.c);
  vst1q_u8(p + 48, x.d);
}
inline B low_nibbles(B x) {
  const uint8x16_t mask = vdupq_n_u8(15);
  PE_MAPN(B, vandq_u8, mask);
}
inline B high_nibbles(B x) { PE_MAPN(B, vshrq_n_u8, 4); }

// acc[i] += w[4 i] a[4 i] + ... + w[4 i + 3] a[4 i + 3]
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define PE_TILES
constexpr const char* kName = "neon_i8mm";
constexpr bool kSignedBytes = false;
inline int32x4_t dot16(int32x4_t acc, uint8x16_t w, int8x16_t a) { return vusdotq_s32(acc, w, a); }
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr const char* kName = "neon_dotprod";
constexpr bool kSignedBytes = true;
inline int32x4_t dot16(int32x4_t acc, uint8x16_t w, int8x16_t a) { return vdotq_s32(acc, vreinterpretq_s8_u8(w), a); }
#else
constexpr const char* kName = "neon";
constexpr bool kSignedBytes = true;
// two products of -128..127 by -127..127 fit 16 bits: 2 * 128 * 127 = 32512
inline int32x4_t dot16(int32x4_t acc, uint8x16_t w, int8x16_t a) {
  const int8x16_t s = vreinterpretq_s8_u8(w);
  return vpadalq_s16(acc, vpaddq_s16(vmull_s8(vget_low_s8(s), vget_low_s8(a)), vmull_high_s8(s, a)));
}
#endif
inline I dot4_u4(I acc, B w, const int8_t* p) {
  int32_t word;
  __builtin_memcpy(&word, p, 4);
  const int8x16_t a = vreinterpretq_s8_s32(vdupq_n_s32(word));
  return {dot16(acc.a, w.a, a), dot16(acc.b, w.b, a), dot16(acc.c, w.c, a), dot16(acc.d, w.d, a)};
}
inline B flip_signs(B x) {
  const uint8x16_t sign = vdupq_n_u8(128);
  PE_MAPN(B, veorq_u8, sign);
}
inline I dot4_u8(I acc, B w, const int8_t* p) { return dot4_u4(acc, kSignedBytes ? flip_signs(w) : w, p); }

#ifdef PE_TILES
constexpr int kTileRows = 4;  // tokens that tile_sums takes at once

inline uint8x16_t zip_low(uint8x16_t x, uint8x16_t y) {
  return vreinterpretq_u8_u32(vzip1q_u32(vreinterpretq_u32_u8(x), vreinterpretq_u32_u8(y)));
}
inline uint8x16_t zip_high(uint8x16_t x, uint8x16_t y) {
  return vreinterpretq_u8_u32(vzip2q_u32(vreinterpretq_u32_u8(x), vreinterpretq_u32_u8(y)));
}
// Two steps of 4 columns -> 16 rows of 8 columns, two in a register: the operands of usmmla.
inline void zip_steps(uint8x16_t* out, B x, B y) {
  const uint8x16_t first[4] = {x.a, x.b, x.c, x.d}, second[4] = {y.a, y.b, y.c, y.d};
  PE_QUARTERS {
    out[2 * i] = zip_low(first[i], second[i]);
    out[2 * i + 1] = zip_high(first[i], second[i]);
  }
}
// The weights as tile_sums reads them, in scratch, where they may be already: a step without a neighbour stays.
template <int SUB>
inline const uint8_t* tile_begin(const uint8_t* bytes, int64_t padded_cols, uint8_t* scratch) {
  int64_t k = 0;
  for (; k + 8 <= padded_cols; k += 8) {
    uint8x16_t pairs[8];
    zip_steps(pairs, bload(bytes + 16 * k), bload(bytes + 16 * k + 64));
    bstore(scratch + 16 * k, {pairs[0], pairs[1], pairs[2], pairs[3]});
    bstore(scratch + 16 * k + 64, {pairs[4], pairs[5], pairs[6], pairs[7]});
  }
  if (k < padded_cols) bstore(scratch + 16 * k, bload(bytes + 16 * k));
  return scratch;
}
inline void tile_end() {}

struct TileSums {  // [2 pairs of tokens][8 pairs of rows], each the 4 sums (row 0: token 0, token 1; row 1 the same)
  int32x4_t v[2][8];
};
inline void tile_step(TileSums& s, const uint8x16_t* weights, const int8_t* q, int64_t stride) {
  const int8x16_t first = vcombine_s8(vld1_s8(q), vld1_s8(q + stride));
  const int8x16_t second = vcombine_s8(vld1_s8(q + 2 * stride), vld1_s8(q + 3 * stride));
  PE_ROW_PAIRS {
    s.v[0][i] = vusmmlaq_s32(s.v[0][i], weights[i], first);
    s.v[1][i] = vusmmlaq_s32(s.v[1][i], weights[i], second);
  }
}
inline void tile_clear(TileSums& s) { PE_ROW_PAIRS s.v[0][i] = s.v[1][i] = vdupq_n_s32(0); }
inline void tile_unzip(const TileSums& s, I* sums) {
  PE_TOKEN_PAIRS {
    const int32x4_t* v = s.v[i];
    sums[2 * i] = {vuzp1q_s32(v[0], v[1]), vuzp1q_s32(v[2], v[3]), vuzp1q_s32(v[4], v[5]), vuzp1q_s32(v[6], v[7])};
    sums[2 * i + 1] = {vuzp2q_s32(v[0], v[1]), vuzp2q_s32(v[2], v[3]), vuzp2q_s32(v[4], v[5]), vuzp2q_s32(v[6], v[7])};
  }
}
inline void tile_pair(TileSums& s, const int8_t* q, int64_t stride, const uint8_t* bytes) {
  const B x = bload(bytes), y = bload(bytes + 64);
  const uint8x16_t weights[8] = {x.a, x.b, x.c, x.d, y.a, y.b, y.c, y.d};
  tile_step(s, weights, q, stride);
}
// sums[j], lane r = sum over SUB columns of the stored byte of row r times the activation of token j at q + j * stride
template <int SUB>
inline void tile_sums(I* sums, const int8_t* q, int64_t stride, const uint8_t* bytes) {
  TileSums s;
  tile_clear(s);
  for (int k = 0; k < SUB; k += 8) tile_pair(s, q + k, stride, bytes + 16 * k);
  tile_unzip(s, sums);
}
// The same for any multiple of 4; reads the activations in eights, of which those past the columns meet zeros.
inline void tile_sums_rest(I* sums, const int8_t* q, int64_t stride, const uint8_t* bytes, int64_t columns) {
  TileSums s;
  tile_clear(s);
  int64_t k = 0;
  for (; k + 8 <= columns; k += 8) tile_pair(s, q + k, stride, bytes + 16 * k);
  if (k < columns) {
    uint8x16_t weights[8];
    const uint8x16_t none = vdupq_n_u8(0);
    zip_steps(weights, bload(bytes + 16 * k), {none, none, none, none});
    tile_step(s, weights, q + k, stride);
  }
  tile_unzip(s, sums);
}
#endif

// not the builtin: gcc takes a function that only prefetches for one without effect and drops its calls
inline void prefetch(const void* p) { asm volatile("prfm pldl2keep, %a0" ::"p"(p)); }
template <class T>
inline void keep(T& x) {
  __asm__ volatile("" : "+w"(x.a), "+w"(x.b), "+w"(x.c), "+w"(x.d));
}

#undef PE_QUARTERS
#undef PE_ROW_PAIRS
#undef PE_TOKEN_PAIRS
#undef PE_MAP1
#undef PE_MAP2
#undef PE_MAPN
#undef PE_LOAD

}  // namespace simd
}  // namespace
