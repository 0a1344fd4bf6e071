// Kernels over single rows: norm, add, activation, RoPE, argmax, gather.
#pragma once

namespace {

// y = (x * 1 / sqrt(mean(x^2) + eps)) * w (Zhang & Sennrich 2019). 16 partial sums, added in a fixed tree.
void rms_norm(const float* x, const float* w, float* y, int64_t n, float eps) {
  F sum = simd::zero();
  const int64_t whole = n / 16 * 16;
  for (int64_t i = 0; i < whole; i += 16) {
    const F v = simd::load(x + i);
    sum = simd::fma(v, v, sum);
  }
  float tail[16] = {0};
  for (int64_t i = whole; i < n; ++i) tail[i - whole] = x[i];
  const F v = simd::load(tail);
  sum = simd::fma(v, v, sum);
  const float inverse = 1.0f / __builtin_sqrtf(reduce_add(sum) / static_cast<float>(n) + eps);
  const F scale = simd::set1(inverse);
  for (int64_t i = 0; i < whole; i += 16)
    simd::store(y + i, simd::mul(simd::mul(simd::load(x + i), scale), simd::load(w + i)));
  for (int64_t i = whole; i < n; ++i) y[i] = (x[i] * inverse) * w[i];
}

// x or, past n, `rest`: 16 values from i on
inline F load_row(const float* x, int64_t i, int64_t n, float rest) {
  if (i + 16 <= n) return simd::load(x + i);
  float part[16];
  for (int64_t j = 0; j < 16; ++j) part[j] = i + j < n ? x[i + j] : rest;
  return simd::load(part);
}

// y = ((x - mean) * 1 / sqrt(mean((x - mean)^2) + eps)) * w + b (Ba et al. 2016). Two passes over the row, each with 16
// partial sums, added in a fixed tree.
void layer_norm(const float* x, const float* w, const float* b, float* y, int64_t n, float eps) {
  F sum = simd::zero(), squares = simd::zero();
  for (int64_t i = 0; i < n; i += 16) sum = simd::add(sum, load_row(x, i, n, 0.0f));
  const float mean = reduce_add(sum) / static_cast<float>(n);
  const F shift = simd::set1(mean);
  for (int64_t i = 0; i < n; i += 16) {
    const F v = simd::sub(load_row(x, i, n, mean), shift);
    squares = simd::fma(v, v, squares);
  }
  const float inverse = 1.0f / __builtin_sqrtf(reduce_add(squares) / static_cast<float>(n) + eps);
  const F scale = simd::set1(inverse);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const F v = simd::mul(simd::sub(simd::load(x + i), shift), scale);
    simd::store(y + i, b ? simd::fma(v, simd::load(w + i), simd::load(b + i)) : simd::mul(v, simd::load(w + i)));
  }
  for (; i < n; ++i) {
    const float v = (x[i] - mean) * inverse;
    y[i] = b ? __builtin_fmaf(v, w[i], b[i]) : v * w[i];
  }
}

void add(const float* x, float* y, int64_t n, float factor) {
  const F by = simd::set1(factor);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) simd::store(y + i, simd::fma(simd::load(x + i), by, simd::load(y + i)));
  for (; i < n; ++i) y[i] = __builtin_fmaf(x[i], factor, y[i]);
}

// n is a multiple of 16: rows are padded to whole panels
void act_mul(const float* x, float* y, int64_t n, int32_t activation) {
  with_activation(activation, [&]<int ACTIVATION>() {
    for (int64_t i = 0; i < n; i += 16)
      simd::store(y + i, simd::mul(activate<ACTIVATION>(simd::load(x + 2 * i)), simd::load(x + 2 * i + 16)));
  });
}

void act(const float* x, float* y, int64_t n, int32_t activation) {
  with_activation(activation, [&]<int ACTIVATION>() {
    for (int64_t i = 0; i < n; i += 16) simd::store(y + i, activate<ACTIVATION>(simd::load(x + i)));
  });
}

void softcap(float* x, int64_t n, float cap) {
  const F size = simd::set1(cap), inverse = simd::set1(1.0f / cap);
  for (int64_t i = 0; i < n; i += 16) simd::store(x + i, simd::mul(tanh(simd::mul(simd::load(x + i), inverse)), size));
}

// Half-split rotation (Su et al. 2021, in the layout of GPT-NeoX): pairs are (i, i + rotary / 2).
void rope(float* x, int64_t rotary, const float* cos, const float* sin) {
  const int64_t half = rotary / 2;
  int64_t i = 0;
  for (; i + 16 <= half; i += 16) {
    const F a = simd::load(x + i), b = simd::load(x + half + i), c = simd::load(cos + i), s = simd::load(sin + i);
    simd::store(x + i, simd::fma(simd::sub(simd::zero(), b), s, simd::mul(a, c)));
    simd::store(x + half + i, simd::fma(a, s, simd::mul(b, c)));
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    x[i] = __builtin_fmaf(-b, sin[i], a * cos[i]);
    x[half + i] = __builtin_fmaf(a, sin[i], b * cos[i]);
  }
}

inline float bf16_to_float(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}

// One row of an embedding, dequantized: [cols]
void gather_row(const Packed* weight, int64_t row, float* out) {
  const Packed& w = *weight;
  if (w.format == PE_ROWS_F32 || w.format == PE_VECTOR_F32) {
    __builtin_memcpy(out, w.data + row * w.cols * 4, w.cols * 4);
    return;
  }
  if (w.format == PE_ROWS_BF16) {
    const uint16_t* p = reinterpret_cast<const uint16_t*>(w.data) + row * w.cols;
    for (int64_t k = 0; k < w.cols; ++k) out[k] = bf16_to_float(p[k]);
    return;
  }
  const uint8_t* panel = w.data + row / kPanel * w.panel_bytes;
  const uint8_t* data = panel + w.data_offset;
  const float* units = reinterpret_cast<const float*>(panel);
  const int64_t r = row % kPanel;
  for (int64_t k = 0; k < w.cols; ++k) {
    if (w.format == PE_F32) {
      out[k] = reinterpret_cast<const float*>(data)[k * kPanel + r];
    } else if (w.format == PE_BF16) {
      out[k] = bf16_to_float(reinterpret_cast<const uint16_t*>(data)[k / 2 * 32 + 2 * r + k % 2]);
    } else {
      const int64_t g = k / w.group * kPanel + r;
      const int q = w.format == PE_INT8 ? data[k / 4 * 64 + 4 * r + k % 4]
                                        : (data[k / 8 * 64 + 4 * r + k % 4] >> (k % 8 < 4 ? 0 : 4)) & 15;
      if (w.format == PE_INT4_MIN) {
        const float scale = static_cast<float>((panel + w.scale_offset)[g]) * units[r];
        const float minimum =
            static_cast<float>(reinterpret_cast<const int8_t*>(panel + w.minimum_offset)[g]) * units[kPanel + r];
        out[k] = __builtin_fmaf(scale, static_cast<float>(q), minimum);
      } else {
        const float scale = static_cast<float>(reinterpret_cast<const int16_t*>(panel + w.scale_offset)[g]) * units[r];
        out[k] = scale * static_cast<float>(q - (w.format == PE_INT8 ? 128 : 8));
      }
    }
  }
}

// Lowest index of the maximum. finite = 0 if any value is NaN or infinite.
int32_t argmax(const float* x, int64_t n, float* max, int32_t* finite) {
  F best = simd::set1(-__builtin_inff()), poison = simd::zero();
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const F v = simd::load(x + i);
    best = simd::max(v, best);
    poison = simd::fma(v, simd::zero(), poison);
  }
  float top = reduce_max(best), bad = reduce_add(poison);
  for (; i < n; ++i) {
    top = fmax1(x[i], top);
    bad = __builtin_fmaf(x[i], 0.0f, bad);
  }
  *max = top;
  *finite = bad == 0.0f;
  for (int64_t j = 0; j < n; ++j)
    if (x[j] == top) return static_cast<int32_t>(j);
  return 0;
}

double sum_exp(const float* x, int64_t n, float max) {
  const F shift = simd::set1(max);
  double total = 0.0;
  int64_t i = 0;
  while (i + 16 <= n) {  // float lanes over at most 4096 values, then double
    F sum = simd::zero();
    for (int64_t end = imin64(n, i + 4096); i + 16 <= end; i += 16)
      sum = simd::add(sum, exp(simd::sub(simd::load(x + i), shift)));
    total += static_cast<double>(reduce_add(sum));
  }
  if (i < n) {
    float tail[16];
    for (int j = 0; j < 16; ++j) tail[j] = i + j < n ? x[i + j] : -__builtin_inff();
    total += static_cast<double>(reduce_add(exp(simd::sub(simd::load(tail), shift))));
  }
  return total;
}

}  // namespace
