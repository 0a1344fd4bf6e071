// Elementary functions over the 16-lane trait. Included once per ISA; every lane gives the same bits on every ISA.
#pragma once

namespace {

using simd::F;
using simd::I;

// The scalar trait is 16 loops already: unrolling around them would only make a huge object.
#ifdef PE_SCALAR_TRAIT
#define PE_UNROLL
#else
#define PE_UNROLL _Pragma("GCC unroll 16")
#endif

inline int64_t imin64(int64_t a, int64_t b) { return a < b ? a : b; }
inline float fmax1(float a, float b) { return a > b ? a : b; }

// Lanes are added in a fixed tree, so the result is the same on every ISA.
inline float reduce_add(F x) {
  float v[16];
  simd::store(v, x);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) v[i] = v[i] + v[i + width];
  return v[0];
}

inline float reduce_max(F x) {
  float v[16];
  simd::store(v, x);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) v[i] = fmax1(v[i], v[i + width]);
  return v[0];
}

// Modulo 2^32: what a NaN was rounded to may not fit.
inline int32_t reduce_add(I x) {
  int32_t v[16];
  uint32_t sum = 0;
  simd::istore(v, x);
  for (int i = 0; i < 16; ++i) sum += static_cast<uint32_t>(v[i]);
  return static_cast<int32_t>(sum);
}

// exp(x): x = n ln 2 + r, |r| <= ln 2 / 2, Taylor polynomial of degree 7 in r (relative error below 1e-7), times 2^n.
// exp(0) is exactly 1; below -87.3 the result is 0, so exp(-inf) is 0; above 88.3 it is inf;
// NaN gives NaN.
inline F exp(F x) {
  const F low = simd::set1(-87.3f), high = simd::set1(88.3f);
  const F clamped = simd::min(high, simd::max(low, x));  // in this order a NaN stays
  const I n = simd::round_int(simd::mul(clamped, simd::set1(1.44269504088896341f)));
  const F nf = simd::to_float(n);
  F r = simd::fma(nf, simd::set1(-0.693359375f), clamped);
  r = simd::fma(nf, simd::set1(2.12194440e-4f), r);
  F p = simd::set1(1.9841270e-4f);
  p = simd::fma(p, r, simd::set1(1.3888889e-3f));
  p = simd::fma(p, r, simd::set1(8.3333333e-3f));
  p = simd::fma(p, r, simd::set1(4.1666667e-2f));
  p = simd::fma(p, r, simd::set1(1.6666667e-1f));
  p = simd::fma(p, r, simd::set1(0.5f));
  p = simd::fma(p, r, simd::set1(1.0f));
  p = simd::fma(p, r, simd::set1(1.0f));
  const F scale = simd::as_float(simd::shl<23>(simd::iadd(n, simd::iset1(127))));
  F y = simd::mul(p, scale);
  y = simd::select_lt(x, low, simd::zero(), y);
  y = simd::select_lt(high, x, simd::set1(__builtin_inff()), y);
  return y;
}

// x / (1 + exp(-x))
inline F silu(F x) { return simd::div(x, simd::add(simd::set1(1.0f), exp(simd::sub(simd::zero(), x)))); }

// x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3): the tanh form of GELU
inline F gelu_tanh(F x) {
  const F cube = simd::mul(simd::mul(x, x), x);
  const F u = simd::mul(simd::set1(0.7978845608f), simd::fma(simd::set1(0.044715f), cube, x));
  return simd::div(x, simd::add(simd::set1(1.0f), exp(simd::mul(simd::set1(-2.0f), u))));
}

// x Phi(x), the exact GELU (Hendrycks & Gimpel 2016): Phi(-|x|) = exp(-x^2 / 2) t P(t), t = 1 / (1 + 0.24 |x|). P is a
// minimax fit to |x| <= 14 (relative error 3e-9), so the tail keeps its digits until exp is 0.
inline F gelu(F x) {
  const F t = simd::div(simd::set1(1.0f), simd::fma(simd::abs(x), simd::set1(0.24f), simd::set1(1.0f)));
  F p = simd::set1(0.0254733562f);
  p = simd::fma(p, t, simd::set1(-0.124334604f));
  p = simd::fma(p, t, simd::set1(0.204723746f));
  p = simd::fma(p, t, simd::set1(-0.143193245f));
  p = simd::fma(p, t, simd::set1(0.140487865f));
  p = simd::fma(p, t, simd::set1(0.0287142731f));
  p = simd::fma(p, t, simd::set1(0.0875517726f));
  p = simd::fma(p, t, simd::set1(0.0889836177f));
  p = simd::fma(p, t, simd::set1(0.0958507806f));
  p = simd::fma(p, t, simd::set1(0.0957424417f));
  const F tail = simd::mul(exp(simd::mul(simd::mul(x, x), simd::set1(-0.5f))), simd::mul(t, p));
  const F low = simd::mul(x, tail);
  return simd::select_lt(x, simd::zero(), low, simd::sub(x, low));
}

// Near 0 an odd polynomial (minimax on |x| <= 0.625, relative error 4e-9), else from e = exp(-2 |x|).
inline F tanh(F x) {
  const F size = simd::abs(x), square = simd::mul(x, x), one = simd::set1(1.0f);
  F p = simd::set1(-0.00570499f);
  p = simd::fma(p, square, simd::set1(0.02063909f));
  p = simd::fma(p, square, simd::set1(-0.05373972f));
  p = simd::fma(p, square, simd::set1(0.13331442f));
  p = simd::fma(p, square, simd::set1(-0.33333282f));
  const F near = simd::fma(simd::mul(x, square), p, x);
  const F e = exp(simd::mul(size, simd::set1(-2.0f)));
  const F far = simd::div(simd::sub(one, e), simd::add(one, e));
  const F signed_far = simd::select_lt(x, simd::zero(), simd::sub(simd::zero(), far), far);
  return simd::select_lt(size, simd::set1(0.625f), near, signed_far);
}

template <int ACTIVATION>
inline F activate(F x) {
  if constexpr (ACTIVATION == PE_SILU)
    return silu(x);
  else if constexpr (ACTIVATION == PE_GELU_TANH)
    return gelu_tanh(x);
  else if constexpr (ACTIVATION == PE_GELU)
    return gelu(x);
  else
    return simd::select_lt(x, simd::zero(), simd::zero(), x);  // ReLU; a NaN stays
}

// Calls body.operator()<ACTIVATION>() with the activation as a constant.
template <class Body>
inline void with_activation(int32_t activation, Body&& body) {
  if (activation == PE_SILU)
    body.template operator()<PE_SILU>();
  else if (activation == PE_GELU_TANH)
    body.template operator()<PE_GELU_TANH>();
  else if (activation == PE_GELU)
    body.template operator()<PE_GELU>();
  else
    body.template operator()<PE_RELU>();
}

// Rounded to the nearest bfloat16, ties to even; the low half of every lane is 0. Finite input.
inline I round_bf16(F x) {
  const I bits = simd::as_int(x);
  const I odd = simd::iand(simd::shr<16>(bits), simd::iset1(1));
  return simd::iand(simd::iadd(bits, simd::iadd(simd::iset1(0x7fff), odd)),
                    simd::iset1(static_cast<int32_t>(0xffff0000)));
}

}  // namespace
