// Elementary functions of the device: the CPU's polynomials (cpu/kernels/math-inl.h), operation by operation, so that
// an element has the same bits on both: products and sums are rounded apart but where fmaf says otherwise
// (--fmad=false), and quotients correctly (nvcc's default).
#pragma once

#include <cuda_runtime.h>

#include "pyengine.h"

namespace pe::cuda {

// exp(x): 2^n times a polynomial in r = x - n ln 2. exp(0) is exactly 1; 0 below -87.3, inf above 88.3; NaN stays.
__device__ __forceinline__ float exp_of(float x) {
  const float above = -87.3f > x ? -87.3f : x;  // in this order a NaN stays
  const float clamped = 88.3f < above ? 88.3f : above;
  const int n = __float2int_rn(clamped * 1.44269504088896341f);
  const float nf = static_cast<float>(n);
  const float r = fmaf(nf, 2.12194440e-4f, fmaf(nf, -0.693359375f, clamped));
  float p = 1.9841270e-4f;
  p = fmaf(p, r, 1.3888889e-3f);
  p = fmaf(p, r, 8.3333333e-3f);
  p = fmaf(p, r, 4.1666667e-2f);
  p = fmaf(p, r, 1.6666667e-1f);
  p = fmaf(p, r, 0.5f);
  p = fmaf(p, r, 1.0f);
  p = fmaf(p, r, 1.0f);
  const float y = p * __int_as_float((n + 127) << 23);
  if (x < -87.3f) return 0.0f;
  return 88.3f < x ? __int_as_float(0x7f800000) : y;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + exp_of(-x)); }

__device__ __forceinline__ float silu(float x) { return x / (1.0f + exp_of(-x)); }

// x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
__device__ __forceinline__ float gelu_tanh(float x) {
  const float cube = x * x * x;
  const float u = 0.7978845608f * fmaf(0.044715f, cube, x);
  return x / (1.0f + exp_of(-2.0f * u));
}

// x Phi(x): Phi(-|x|) = exp(-x^2 / 2) t P(t), t = 1 / (1 + 0.24 |x|)
__device__ __forceinline__ float gelu(float x) {
  const float t = 1.0f / fmaf(fabsf(x), 0.24f, 1.0f);
  float p = 0.0254733562f;
  p = fmaf(p, t, -0.124334604f);
  p = fmaf(p, t, 0.204723746f);
  p = fmaf(p, t, -0.143193245f);
  p = fmaf(p, t, 0.140487865f);
  p = fmaf(p, t, 0.0287142731f);
  p = fmaf(p, t, 0.0875517726f);
  p = fmaf(p, t, 0.0889836177f);
  p = fmaf(p, t, 0.0958507806f);
  p = fmaf(p, t, 0.0957424417f);
  const float tail = exp_of(x * x * -0.5f) * (t * p);
  const float low = x * tail;
  return x < 0.0f ? low : x - low;
}

// Near 0 an odd polynomial, else from e = exp(-2 |x|).
__device__ __forceinline__ float tanh_of(float x) {
  const float size = fabsf(x), square = x * x;
  float p = -0.00570499f;
  p = fmaf(p, square, 0.02063909f);
  p = fmaf(p, square, -0.05373972f);
  p = fmaf(p, square, 0.13331442f);
  p = fmaf(p, square, -0.33333282f);
  const float near = fmaf(x * square, p, x);
  const float e = exp_of(size * -2.0f);
  const float far = (1.0f - e) / (1.0f + e);
  return size < 0.625f ? near : x < 0.0f ? -far : far;
}

__device__ __forceinline__ float activate(int activation, float x) {
  if (activation == PE_SILU) return silu(x);
  if (activation == PE_GELU_TANH) return gelu_tanh(x);
  if (activation == PE_GELU) return gelu(x);
  return x < 0.0f ? 0.0f : x;  // ReLU; a NaN stays
}

}  // namespace pe::cuda
