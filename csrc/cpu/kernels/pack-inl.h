// Quantize and pack one panel: 16 rows are the 16 lanes, so the search for scales runs on whole vectors.
//
// The search (docs/packed_formats.md): every candidate fixes integers q by rounding, refits the scale (and minimum) to
// them by least squares weighted with the importance of the columns, rounds those to bfloat16 as stored, rounds q again
// with the stored values and measures the weighted squared error; the candidate with the least error wins, lane by lane.
#pragma once

namespace {

// Rows of the source -> w[k][16], rows past the end and columns past K are 0. Notes the first value that is not finite.
inline void transpose_rows(PackArgs& a, float* w) {
  const Packed& t = *a.weight;
  const int64_t columns = (t.cols + 7) / 8 * 8;
  for (int r = 0; r < kPanel; ++r) {
    const int64_t row = a.first_row + r;
    if (row >= a.source_rows) {
      for (int64_t k = 0; k < columns; ++k) w[k * kPanel + r] = 0.0f;
      continue;
    }
    const uint8_t* p = static_cast<const uint8_t*>(a.source) + row * t.cols * (a.source_dtype == PE_SRC_F32 ? 4 : 2);
    float poison = 0.0f;
    if (a.source_dtype == PE_SRC_F32) {
      for (int64_t k = 0; k < t.cols; ++k) {
        float x;
        __builtin_memcpy(&x, p + 4 * k, 4);
        w[k * kPanel + r] = x;
        poison = poison + x * 0.0f;
      }
    } else if (a.source_dtype == PE_SRC_BF16) {
      for (int64_t k = 0; k < t.cols; ++k) {
        uint16_t h;
        __builtin_memcpy(&h, p + 2 * k, 2);
        const float x = bf16_to_float(h);
        w[k * kPanel + r] = x;
        poison = poison + x * 0.0f;
      }
    } else {
      for (int64_t k = 0; k < t.cols; ++k) {
        uint16_t h;
        __builtin_memcpy(&h, p + 2 * k, 2);
        // float16: shift into place, then scale the exponent by 2^112; Inf and NaN have exponent 31
        const uint32_t magnitude = static_cast<uint32_t>(h & 0x7fff) << 13;
        float x;
        __builtin_memcpy(&x, &magnitude, 4);
        x = x * 5.192296858534828e33f;
        if ((h & 0x7c00) == 0x7c00) x = __builtin_nanf("");
        if (h & 0x8000) x = -x;
        w[k * kPanel + r] = x;
        poison = poison + x * 0.0f;
      }
    }
    for (int64_t k = t.cols; k < columns; ++k) w[k * kPanel + r] = 0.0f;
    if (poison == 0.0f) continue;
    for (int64_t k = 0; k < t.cols && a.bad_row < 0; ++k) {
      if (w[k * kPanel + r] * 0.0f == 0.0f) continue;
      a.bad_row = row;
      a.bad_col = k;
    }
  }
}

inline I clamp_int(I x, int low, int high) { return simd::imin(simd::imax(x, simd::iset1(low)), simd::iset1(high)); }

inline F stored(F x) {  // as bfloat16 keeps it, never rounded up to infinity
  const F most = simd::set1(3.38e38f);
  return simd::as_float(round_bf16(simd::max(simd::min(x, most), simd::sub(simd::zero(), most))));
}

// 1 / x where |x| is large enough to divide by, else 0
inline F safe_inverse(F x) {
  return simd::select_lt(simd::abs(x), simd::set1(1.2e-38f), simd::zero(), simd::div(simd::set1(1.0f), x));
}

struct Group {  // a group of one panel: n columns of 16 lanes, with the lanes divided by their own largest magnitude
  F w[128];
  const float* importance;  // [n] or nullptr
  int n;
  F amax;
  F h(int k) const { return simd::set1(importance ? importance[k] : 1.0f); }
};

inline void load_group(const float* w, int n, const float* importance, Group& g) {
  F amax = simd::zero();
  for (int k = 0; k < n; ++k) amax = simd::max(amax, simd::abs(simd::load(w + k * kPanel)));
  const F inverse = safe_inverse(amax);
  for (int k = 0; k < n; ++k) g.w[k] = simd::mul(simd::load(w + k * kPanel), inverse);
  g.importance = importance;
  g.n = n;
  g.amax = simd::select_lt(amax, simd::set1(1.2e-38f), simd::zero(), amax);
}

struct Fit {
  F scale, minimum, error;  // scale and minimum in units of amax, error weighted
};

// q = clamp(round((w - minimum) / scale)), as integers in float
template <int LOW, int HIGH>
inline F quant(F w, F inverse, F minimum) {
  return simd::to_float(clamp_int(simd::round_int(simd::mul(simd::sub(w, minimum), inverse)), LOW, HIGH));
}

inline void keep_better(Fit& best, const Fit& fit) {
  best.scale = simd::select_lt(fit.error, best.error, fit.scale, best.scale);
  best.minimum = simd::select_lt(fit.error, best.error, fit.minimum, best.minimum);
  best.error = simd::select_lt(fit.error, best.error, fit.error, best.error);
}

// Values as stored, in units of amax, and the error with q rounded to them.
template <int LOW, int HIGH>
inline Fit measure(const Group& g, F scale, F minimum) {
  const F unit = safe_inverse(g.amax);
  Fit fit{simd::mul(stored(simd::mul(scale, g.amax)), unit), simd::mul(stored(simd::mul(minimum, g.amax)), unit), simd::zero()};
  const F inverse = safe_inverse(fit.scale);
  for (int k = 0; k < g.n; ++k) {
    const F q = quant<LOW, HIGH>(g.w[k], inverse, fit.minimum);
    const F d = simd::sub(simd::sub(g.w[k], fit.minimum), simd::mul(fit.scale, q));
    fit.error = simd::fma(simd::mul(g.h(k), d), d, fit.error);
  }
  return fit;
}

// Symmetric, w ~ scale * q: the candidates' largest |q| runs around HIGH; refit scale = sum(h w q) / sum(h q q).
template <int LOW, int HIGH>
inline Fit search_symmetric(const Group& g, const float* candidates, int count) {
  F extreme = simd::zero(), size = simd::zero();  // the value of largest magnitude, with its sign
  for (int k = 0; k < g.n; ++k) {
    const F m = simd::abs(g.w[k]);
    extreme = simd::select_lt(size, m, g.w[k], extreme);
    size = simd::max(m, size);
  }
  Fit best{simd::zero(), simd::zero(), simd::set1(__builtin_inff())};
  for (int c = 0; c < count; ++c) {
    const F scale = simd::div(extreme, simd::set1(candidates[c]));
    const F inverse = safe_inverse(scale);
    F qq = simd::zero(), wq = simd::zero();
    for (int k = 0; k < g.n; ++k) {
      const F q = quant<LOW, HIGH>(g.w[k], inverse, simd::zero()), hq = simd::mul(g.h(k), q);
      qq = simd::fma(hq, q, qq);
      wq = simd::fma(hq, g.w[k], wq);
    }
    // importance 0 everywhere leaves nothing to fit: the candidate stands
    const F fitted = simd::select_lt(simd::zero(), qq, simd::mul(wq, safe_inverse(qq)), scale);
    keep_better(best, measure<LOW, HIGH>(g, fitted, simd::zero()));
  }
  return best;
}

// With a minimum, w ~ scale * q + minimum, q in 0..15.
inline Fit search_minimum(const Group& g, const float (*candidates)[2], int count) {
  F low = g.w[0], high = g.w[0];
  for (int k = 1; k < g.n; ++k) {
    low = simd::min(low, g.w[k]);
    high = simd::max(high, g.w[k]);
  }
  const F range = simd::sub(high, low);
  Fit best{simd::zero(), simd::zero(), simd::set1(__builtin_inff())};
  for (int c = 0; c < count; ++c) {
    F minimum = simd::fma(range, simd::set1(candidates[c][0]), low);
    F scale = simd::mul(range, simd::set1((1.0f - candidates[c][0] - candidates[c][1]) / 15.0f));
    const F inverse = safe_inverse(scale);
    F h0 = simd::zero(), q1 = simd::zero(), q2 = simd::zero(), w1 = simd::zero(), wq = simd::zero();
    for (int k = 0; k < g.n; ++k) {
      const F q = quant<0, 15>(g.w[k], inverse, minimum), h = g.h(k), hq = simd::mul(h, q);
      h0 = simd::add(h0, h);
      q1 = simd::add(q1, hq);
      q2 = simd::fma(hq, q, q2);
      w1 = simd::fma(h, g.w[k], w1);
      wq = simd::fma(hq, g.w[k], wq);
    }
    const F det = simd::sub(simd::mul(h0, q2), simd::mul(q1, q1));
    const F tiny = simd::mul(simd::set1(1e-6f), simd::mul(h0, q2));
    scale = simd::select_lt(tiny, det, simd::mul(simd::sub(simd::mul(h0, wq), simd::mul(q1, w1)), safe_inverse(det)), scale);
    // the scale as it will be stored, then the minimum that fits it
    scale = simd::mul(stored(simd::mul(scale, g.amax)), safe_inverse(g.amax));
    const F fitted = simd::mul(simd::sub(w1, simd::mul(scale, q1)), safe_inverse(h0));
    minimum = simd::select_lt(simd::zero(), h0, fitted, minimum);
    keep_better(best, measure<0, 15>(g, scale, minimum));
  }
  return best;
}

inline I quant_stored(const Group& g, const Fit& fit, int k, int low, int high) {
  const F inverse = safe_inverse(fit.scale);
  return clamp_int(simd::round_int(simd::mul(simd::sub(g.w[k], fit.minimum), inverse)), low, high);
}

inline void store_scale(uint16_t* p, F x, F amax) { simd::store_high16(p, simd::as_int(stored(simd::mul(x, amax)))); }

// largest |q| of a candidate: a little inside and outside the plain maximum
constexpr float kInt8Candidates[] = {127.0f};
constexpr float kInt4Candidates[] = {-8.0f, -7.6f, -7.2f, -8.4f, -8.8f, -9.2f, -9.6f, -10.0f, -6.8f, 7.0f, 7.4f, 7.8f, 8.2f, 8.6f};
// part of the range cut at its low and high end
constexpr float kMinimumCandidates[][2] = {{0.0f, 0.0f},   {0.02f, 0.02f}, {0.04f, 0.04f}, {0.06f, 0.06f}, {0.08f, 0.08f},
                                           {0.1f, 0.1f},   {0.13f, 0.13f}, {0.05f, 0.0f},  {0.0f, 0.05f},  {0.1f, 0.0f},
                                           {0.0f, 0.1f},   {0.15f, 0.05f}, {0.05f, 0.15f}, {-0.03f, -0.03f}};

inline void pack_int8(const Packed& t, uint8_t* panel, const float* w, const float* importance) {
  Group g;
  for (int64_t i = 0; i < t.groups; ++i) {
    const int64_t k0 = i * t.group;
    const int n = static_cast<int>(imin64(t.group, t.cols - k0));
    load_group(w + k0 * kPanel, n, importance ? importance + k0 : nullptr, g);
    const Fit fit = search_symmetric<-127, 127>(g, kInt8Candidates, 1);
    store_scale(reinterpret_cast<uint16_t*>(panel) + i * kPanel, fit.scale, g.amax);
    for (int k = 0; k < n; k += 4) {
      I word = simd::izero();
      for (int j = 3; j >= 0; --j) {
        const I q = k + j < n ? quant_stored(g, fit, k + j, -127, 127) : simd::izero();
        word = simd::ior(simd::shl<8>(word), simd::iadd(q, simd::iset1(128)));
      }
      simd::istore(reinterpret_cast<int32_t*>(panel + t.data_offset + (k0 + k) / 4 * 64), word);
    }
  }
}

inline void pack_int4(const Packed& t, uint8_t* panel, const float* w, const float* importance) {
  const bool minimum = t.format == PE_INT4_MIN;
  constexpr int kSymmetric = sizeof kInt4Candidates / sizeof *kInt4Candidates;
  constexpr int kWithMinimum = sizeof kMinimumCandidates / sizeof *kMinimumCandidates;
  Group g;
  for (int64_t i = 0; i < t.groups; ++i) {
    const int64_t k0 = i * t.group;
    const int n = static_cast<int>(imin64(t.group, t.cols - k0));
    load_group(w + k0 * kPanel, n, importance ? importance + k0 : nullptr, g);
    const Fit fit = minimum ? search_minimum(g, kMinimumCandidates, kWithMinimum)
                            : search_symmetric<-8, 7>(g, kInt4Candidates, kSymmetric);
    store_scale(reinterpret_cast<uint16_t*>(panel) + i * kPanel, fit.scale, g.amax);
    if (minimum) store_scale(reinterpret_cast<uint16_t*>(panel + t.minimum_offset) + i * kPanel, fit.minimum, g.amax);
    const int low = minimum ? 0 : -8;
    for (int k = 0; k < n; k += 8) {
      I word = simd::izero();
      for (int j = 3; j >= 0; --j) {
        const I first = k + j < n ? quant_stored(g, fit, k + j, low, low + 15) : simd::iset1(low);
        const I second = k + 4 + j < n ? quant_stored(g, fit, k + 4 + j, low, low + 15) : simd::iset1(low);
        const I byte = simd::ior(simd::iadd(first, simd::iset1(-low)), simd::shl<4>(simd::iadd(second, simd::iset1(-low))));
        word = simd::ior(simd::shl<8>(word), byte);
      }
      simd::istore(reinterpret_cast<int32_t*>(panel + t.data_offset + (k0 + k) / 8 * 64), word);
    }
  }
}

void pack_panel(PackArgs* args) {
  PackArgs& a = *args;
  const Packed& t = *a.weight;
  float* w = a.scratch;
  transpose_rows(a, w);
  if (a.bad_row >= 0) return;
  uint8_t* panel = t.data + a.panel * t.panel_bytes;
  if (t.format == PE_INT8) return pack_int8(t, panel, w, a.importance);
  if (t.format == PE_INT4_SYM || t.format == PE_INT4_MIN) return pack_int4(t, panel, w, a.importance);
  if (t.format == PE_F32) {
    __builtin_memcpy(panel + t.data_offset, w, t.cols * kPanel * 4);
    return;
  }
  for (int64_t k = 0; k < t.padded_cols; k += 2) {  // bf16: [K/2][16][2]
    const I even = simd::shr<16>(round_bf16(simd::load(w + k * kPanel)));
    const I odd = k + 1 < t.cols ? round_bf16(simd::load(w + (k + 1) * kPanel)) : simd::izero();
    simd::istore(reinterpret_cast<int32_t*>(panel + t.data_offset) + k / 2 * kPanel, simd::ior(even, odd));
  }
}

}  // namespace
