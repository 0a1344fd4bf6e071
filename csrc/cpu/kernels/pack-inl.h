// Quantize and pack one panel: 16 rows are the 16 lanes, so the search for scales runs on whole vectors.
//
// The search (docs/packed_formats.md): every candidate fixes integers q by rounding and asks how much of the squared
// error, weighted with the importance of the columns, the best scale (and minimum) for those q would remove; the
// candidate with the largest gain wins, lane by lane. The values are then rounded as they are stored, and q again to
// them.
#pragma once

namespace {

// Sixteen columns of a row from `at`, at any alignment, as float. A float16 that is Inf or NaN becomes NaN.
inline F load_columns(const uint8_t* at, int32_t dtype) {
  if (dtype == PE_SRC_F32) {
    float values[16];
    __builtin_memcpy(values, at, sizeof values);
    return simd::load(values);
  }
  uint16_t halves[16];
  __builtin_memcpy(halves, at, sizeof halves);
  const I h = simd::iload_u16(halves);
  if (dtype == PE_SRC_BF16) return simd::as_float(simd::shl<16>(h));
  // exponent 0 is mantissa * 2^-24 (as an integer: a float denormal would be flushed); else the exponent's bias moves
  // from 15 to 127
  const I exponent = simd::iand(simd::shr<10>(h), simd::iset1(31)), mantissa = simd::iand(h, simd::iset1(1023));
  const I bits = simd::ior(simd::shl<23>(simd::iadd(exponent, simd::iset1(112))), simd::shl<13>(mantissa));
  const F e = simd::to_float(exponent);
  F x = simd::select_lt(e, simd::set1(0.5f), simd::mul(simd::to_float(mantissa), simd::set1(5.9604644775390625e-8f)),
                        simd::as_float(bits));
  x = simd::select_lt(simd::set1(30.5f), e, simd::set1(__builtin_nanf("")), x);
  return simd::as_float(simd::ior(simd::as_int(x), simd::shl<16>(simd::iand(h, simd::iset1(0x8000)))));
}

// Rows of the source -> w[k][16], rows past the end and columns past K are 0. Notes the first value that is not finite.
inline void transpose_rows(PackArgs& a, float* w) {
  const Packed& t = *a.weight;
  const int64_t columns = (t.cols + 7) / 8 * 8, bytes = a.source_dtype == PE_SRC_F32 ? 4 : 2;
  const uint8_t* source = static_cast<const uint8_t*>(a.source) + a.first_row * t.cols * bytes;
  const int rows = static_cast<int>(imin64(kPanel, a.source_rows - a.first_row));
  F poison = simd::zero();  // NaN after any value that is not finite
  for (int64_t k = 0; k < columns; k += 16) {
    F block[16];
    for (int r = 0; r < kPanel; ++r) {
      block[r] = simd::zero();
      if (r >= rows) continue;
      const uint8_t* at = source + (r * t.cols + k) * bytes;
      if (k + 16 <= t.cols) {
        block[r] = load_columns(at, a.source_dtype);
      } else {
        uint8_t last[64] = {};
        __builtin_memcpy(last, at, static_cast<size_t>((t.cols - k) * bytes));
        block[r] = load_columns(last, a.source_dtype);
      }
      poison = simd::add(poison, simd::mul(block[r], simd::zero()));
    }
    simd::transpose(block);
    const int count = static_cast<int>(imin64(16, columns - k));
    for (int c = 0; c < count; ++c) simd::store(w + (k + c) * kPanel, block[c]);
  }
  if (reduce_add(poison) == 0.0f) return;
  for (int r = 0; r < rows && a.bad_row < 0; ++r)
    for (int64_t k = 0; k < t.cols && a.bad_row < 0; ++k) {
      if (w[k * kPanel + r] * 0.0f == 0.0f) continue;
      a.bad_row = a.first_row + r;
      a.bad_col = k;
    }
}

inline I clamp_int(I x, int low, int high) { return simd::imin(simd::imax(x, simd::iset1(low)), simd::iset1(high)); }

// 1 / x where |x| is large enough to divide by, else 0
inline F safe_inverse(F x) {
  return simd::select_lt(simd::abs(x), simd::set1(1.2e-38f), simd::zero(), simd::div(simd::set1(1.0f), x));
}

struct Group {              // a group of one panel: n columns of 16 lanes
  const float* w;           // [n][16], lanes divided by their row's largest magnitude
  const float* importance;  // [n]
  int n;
  F at(int k) const { return simd::load(w + k * kPanel); }
  F h(int k) const { return simd::set1(importance[k]); }
};

inline Group group_at(const Packed& t, const float* w, const float* importance, int64_t i) {
  const int64_t k0 = i * t.group;
  return {w + k0 * kPanel, importance + k0, static_cast<int>(imin64(t.group, t.cols - k0))};
}

// x / amax, 0 where amax is 0. In two steps, because 1 / amax itself may be a denormal.
inline F divide_by(F x, F amax) {
  const F quarter = simd::set1(0.25f);
  return simd::mul(simd::mul(x, safe_inverse(simd::mul(amax, quarter))), quarter);
}

// Divides every lane by its largest magnitude, which is returned; a row of denormals becomes 0. So no square overflows.
inline F normalize_rows(float* w, int64_t columns) {
  F amax = simd::zero();
  for (int64_t k = 0; k < columns; ++k) amax = simd::max(amax, simd::abs(simd::load(w + k * kPanel)));
  amax = simd::select_lt(amax, simd::set1(1.2e-38f), simd::zero(), amax);
  for (int64_t k = 0; k < columns; ++k) simd::store(w + k * kPanel, divide_by(simd::load(w + k * kPanel), amax));
  return amax;
}

template <int LOW, int HIGH>
inline F round_clip(F x) {
  return simd::to_float(clamp_int(simd::round_int(x), LOW, HIGH));
}

// The same (0 may be -0) for |x| below 2^31, which candidates keep: their scales are parts of the group's range.
template <int LOW, int HIGH>
inline F clip_round(F x) {
  return simd::round_float(simd::min(simd::max(x, simd::set1(LOW)), simd::set1(HIGH)));
}

// ---- with a minimum: w ~ scale * q + minimum, q in 0..15 -----------------------------------------------------------

struct Affine {
  F scale, minimum;
};

struct AffineFit {
  Affine values;
  F gain;  // what the fit removes of sum h (w - mean)^2
};

// From a = sum h q, b = sum h q^2, c = sum h q (w - mean).
inline AffineFit affine_of(F a, F b, F c, F mean, F h0) {
  const F centre = simd::mul(a, safe_inverse(h0));
  const F spread = simd::sub(b, simd::mul(a, centre));
  const F flat = simd::mul(simd::set1(1e-6f), h0);  // all q alike: only the mean is left
  const F scale = simd::select_lt(flat, spread, simd::mul(c, safe_inverse(spread)), simd::zero());
  return {{scale, simd::sub(mean, simd::mul(scale, centre))}, simd::mul(scale, c)};
}

// Integers of (scale, minimum), then the least squares fit to them. mean = sum(h w) / h0, h0 = sum h.
inline AffineFit fit_affine(const Group& g, Affine from, F mean, F h0) {
  const F inverse = safe_inverse(from.scale);
  F a = simd::zero(), b = simd::zero(), c = simd::zero();
  for (int k = 0; k < g.n; ++k) {
    const F w = g.at(k), q = round_clip<0, 15>(simd::mul(simd::sub(w, from.minimum), inverse)),
            hq = simd::mul(g.h(k), q);
    a = simd::add(a, hq);
    b = simd::fma(hq, q, b);
    c = simd::fma(hq, simd::sub(w, mean), c);
  }
  return affine_of(a, b, c, mean, h0);
}

// Candidates that cut part i of the range at its low end and j, j + 1 ... j + N - 1 at its high end: fit_affine of
// each, in one pass over the group, the better kept in `best`.
template <int N>
inline void try_affine(const Group& g, F range, F low, int i, int j, F mean, F h0, AffineFit& best) {
  const float cut_low = 0.04f * static_cast<float>(i);
  const F minimum = simd::fma(range, simd::set1(cut_low), low);
  F inverse[N], a[N], b[N], c[N];
  PE_UNROLL
  for (int n = 0; n < N; ++n) {
    const float cut_high = 0.04f * static_cast<float>(j + n);
    inverse[n] = safe_inverse(simd::mul(range, simd::set1((1.0f - cut_low - cut_high) / 15.0f)));
    a[n] = b[n] = c[n] = simd::zero();
  }
  for (int k = 0; k < g.n; ++k) {
    const F w = g.at(k), h = g.h(k), above = simd::sub(w, minimum), centred = simd::sub(w, mean);
    PE_UNROLL
    for (int n = 0; n < N; ++n) {
      const F q = clip_round<0, 15>(simd::mul(above, inverse[n])), hq = simd::mul(h, q);
      a[n] = simd::add(a[n], hq);
      b[n] = simd::fma(hq, q, b[n]);
      c[n] = simd::fma(hq, centred, c[n]);
    }
  }
  PE_UNROLL
  for (int n = 0; n < N; ++n) {
    const AffineFit fit = affine_of(a[n], b[n], c[n], mean, h0);
    best.values.scale = simd::select_lt(best.gain, fit.gain, fit.values.scale, best.values.scale);
    best.values.minimum = simd::select_lt(best.gain, fit.gain, fit.values.minimum, best.values.minimum);
    best.gain = simd::max(fit.gain, best.gain);
  }
}

inline Affine search_affine(const Group& g) {
  F low = g.at(0), high = low, h0 = simd::zero(), sum = simd::zero();
  for (int k = 0; k < g.n; ++k) {
    const F w = g.at(k), h = g.h(k);
    low = simd::min(low, w);
    high = simd::max(high, w);
    h0 = simd::add(h0, h);
    sum = simd::fma(h, w, sum);
  }
  const F range = simd::sub(high, low), mean = simd::mul(sum, safe_inverse(h0));
  AffineFit best{{simd::zero(), mean}, simd::set1(-1.0f)};
  constexpr int kCuts = 5;  // parts of the range cut at each end
  static_assert(kCuts % simd::kAffineCandidates == 0);
  for (int i = 0; i < kCuts; ++i)
    for (int j = 0; j < kCuts; j += simd::kAffineCandidates)
      try_affine<simd::kAffineCandidates>(g, range, low, i, j, mean, h0, best);
  return fit_affine(g, best.values, mean, h0).values;
}

inline I affine_q(F w, F inverse, F minimum) {
  return clamp_int(simd::round_int(simd::mul(simd::sub(w, minimum), inverse)), 0, 15);
}

// The minimum that fits the integers of a scale already rounded.
inline F refit_minimum(const Group& g, F scale, F minimum) {
  const F inverse = safe_inverse(scale);
  F h0 = simd::zero(), sum = simd::zero();
  for (int k = 0; k < g.n; ++k) {
    const F w = g.at(k), h = g.h(k);
    h0 = simd::add(h0, h);
    sum = simd::fma(h, simd::sub(w, simd::mul(scale, simd::to_float(affine_q(w, inverse, minimum)))), sum);
  }
  return simd::mul(sum, safe_inverse(h0));
}

// Eight columns from k as one step of int4 data; columns past n get `pad`.
template <class Q>
inline void store_nibbles(uint8_t* to, int n, int k, int pad, Q&& q) {
  I word = simd::izero();
  for (int j = 3; j >= 0; --j) {
    const I first = k + j < n ? q(k + j) : simd::iset1(pad);
    const I second = k + 4 + j < n ? q(k + 4 + j) : simd::iset1(pad);
    word = simd::ior(simd::shl<8>(word), simd::ior(first, simd::shl<4>(second)));
  }
  simd::istore(reinterpret_cast<int32_t*>(to), word);
}

// int4 steps are so wide that a fitted value may pass the row's largest magnitude. Rows at the very end of float's
// range are stored a little smaller, by less than half a step, so that this does not overflow.
inline F leave_headroom(F amax) { return simd::min(amax, simd::set1(3.2e38f)); }

// Scales are 0..255 and minimums -127..127 in units of the row: two floats per row.
inline void pack_int4_minimum(const Packed& t, uint8_t* panel, float* w, const float* importance) {
  const F amax = leave_headroom(normalize_rows(w, t.cols));
  float* found = w + (t.cols + 7) / 8 * 8 * kPanel;  // [groups][2][16]: the values, until the row's units are known
  F scale_max = simd::zero(), minimum_max = simd::zero();
  for (int64_t i = 0; i < t.groups; ++i) {
    const Affine fit = search_affine(group_at(t, w, importance, i));
    simd::store(found + 2 * i * kPanel, fit.scale);
    simd::store(found + (2 * i + 1) * kPanel, fit.minimum);
    scale_max = simd::max(fit.scale, scale_max);
    minimum_max = simd::max(simd::abs(fit.minimum), minimum_max);
  }
  const F scale_unit = simd::mul(scale_max, simd::set1(1.0f / 255.0f));
  const F minimum_unit = simd::mul(minimum_max, simd::set1(1.0f / 127.0f));
  const F scale_inverse = safe_inverse(scale_unit), minimum_inverse = safe_inverse(minimum_unit);
  simd::store(reinterpret_cast<float*>(panel), simd::mul(scale_unit, amax));
  simd::store(reinterpret_cast<float*>(panel) + kPanel, simd::mul(minimum_unit, amax));
  for (int64_t i = 0; i < t.groups; ++i) {
    const Group g = group_at(t, w, importance, i);
    const F wanted = simd::load(found + 2 * i * kPanel);
    // a group that is not flat keeps at least one step beside much larger ones
    const F steps = simd::max(simd::mul(wanted, scale_inverse),
                              simd::select_lt(simd::zero(), wanted, simd::set1(1.0f), simd::zero()));
    const I a = clamp_int(simd::round_int(steps), 0, 255);
    const F scale = simd::mul(simd::to_float(a), scale_unit);
    const F refit = refit_minimum(g, scale, simd::load(found + (2 * i + 1) * kPanel));
    const I b = clamp_int(simd::round_int(simd::mul(refit, minimum_inverse)), -127, 127);
    const F minimum = simd::mul(simd::to_float(b), minimum_unit), inverse = safe_inverse(scale);
    simd::store_low8(reinterpret_cast<int8_t*>(panel + t.scale_offset) + i * kPanel, a);
    simd::store_low8(reinterpret_cast<int8_t*>(panel + t.minimum_offset) + i * kPanel, b);
    uint8_t* data = panel + t.data_offset + i * t.group * 8;
    for (int k = 0; k < g.n; k += 8)
      store_nibbles(data + k * 8, g.n, k, 0, [&](int c) { return affine_q(g.at(c), inverse, minimum); });
  }
}

// ---- symmetric: w ~ scale * q
// ------------------------------------------------------------------------------------------

struct SymmetricFit {
  F scale, gain;
};

template <int LOW, int HIGH>
inline SymmetricFit fit_symmetric(const Group& g, F scale) {
  const F inverse = safe_inverse(scale);
  F qq = simd::zero(), wq = simd::zero();
  for (int k = 0; k < g.n; ++k) {
    const F w = g.at(k), q = round_clip<LOW, HIGH>(simd::mul(w, inverse)), hq = simd::mul(g.h(k), q);
    qq = simd::fma(hq, q, qq);
    wq = simd::fma(hq, w, wq);
  }
  const F fitted = simd::mul(wq, safe_inverse(qq));
  return {fitted, simd::mul(fitted, wq)};
}

// Candidates c, c + 1 ... c + N - 1, which put the extreme at -5.6, -5.8 ... -8.6: fit_symmetric of each, the better
// kept.
template <int N>
inline void try_symmetric(const Group& g, F extreme, int c, SymmetricFit& best) {
  F inverse[N], qq[N], wq[N];
  PE_UNROLL
  for (int n = 0; n < N; ++n) {
    const float place = 5.6f + 0.2f * static_cast<float>(c + n);
    inverse[n] = safe_inverse(simd::mul(extreme, simd::set1(-1.0f / place)));
    qq[n] = wq[n] = simd::zero();
  }
  for (int k = 0; k < g.n; ++k) {
    const F w = g.at(k), h = g.h(k);
    PE_UNROLL
    for (int n = 0; n < N; ++n) {
      const F q = clip_round<-8, 7>(simd::mul(w, inverse[n])), hq = simd::mul(h, q);
      qq[n] = simd::fma(hq, q, qq[n]);
      wq[n] = simd::fma(hq, w, wq[n]);
    }
  }
  PE_UNROLL
  for (int n = 0; n < N; ++n) {
    const F fitted = simd::mul(wq[n], safe_inverse(qq[n])), gain = simd::mul(fitted, wq[n]);
    best.scale = simd::select_lt(best.gain, gain, fitted, best.scale);
    best.gain = simd::max(gain, best.gain);
  }
}

// The value of largest magnitude, with its sign; of two equal ones the negative.
inline F extreme_of(const Group& g) {
  F low = simd::zero(), high = simd::zero();
  for (int k = 0; k < g.n; ++k) {
    low = simd::min(low, g.at(k));
    high = simd::max(high, g.at(k));
  }
  return simd::select_lt(simd::sub(simd::zero(), low), high, high, low);
}

// Scales are int16 in units of the row: its largest magnitude, over a divisor no wanted scale exceeds, over 32767.
constexpr float kSymmetricUnit = 1.0f / (5.0f * 32767.0f);
constexpr float kInt8Unit = 1.0f / (110.0f * 32767.0f);

// Never 0 for a group that is not, so that no group is lost beside a much larger one.
inline I scale_steps(F scale, float unit) {
  const I steps = clamp_int(simd::round_int(simd::div(scale, simd::set1(unit))), -32767, 32767);
  const F size = simd::abs(scale), none = simd::zero();
  const F least = simd::select_lt(none, size, simd::select_lt(scale, none, simd::set1(-1.0f), simd::set1(1.0f)), none);
  const F stepped = simd::to_float(steps);
  return simd::round_int(simd::select_lt(simd::abs(stepped), simd::set1(0.5f), least, stepped));
}

inline void store_steps(uint8_t* scales, int64_t group, I steps) {
  simd::store_high16(reinterpret_cast<uint16_t*>(scales) + group * kPanel, simd::shl<16>(steps));
}

inline void pack_int4_symmetric(const Packed& t, uint8_t* panel, float* w, const float* importance) {
  const F amax = leave_headroom(normalize_rows(w, t.cols));
  simd::store(reinterpret_cast<float*>(panel), simd::mul(amax, simd::set1(kSymmetricUnit)));
  for (int64_t i = 0; i < t.groups; ++i) {
    const Group g = group_at(t, w, importance, i);
    const F extreme = extreme_of(g);
    SymmetricFit best{simd::zero(), simd::set1(-1.0f)};
    for (int c = 0; c < 16; c += simd::kScaleCandidates) try_symmetric<simd::kScaleCandidates>(g, extreme, c, best);
    F scale = best.scale;
    for (int again = 0; again < 2; ++again) scale = fit_symmetric<-8, 7>(g, scale).scale;
    const I steps = scale_steps(scale, kSymmetricUnit);
    store_steps(panel + t.scale_offset, i, steps);
    const F inverse = safe_inverse(simd::mul(simd::to_float(steps), simd::set1(kSymmetricUnit)));
    uint8_t* data = panel + t.data_offset + i * t.group * 8;
    for (int k = 0; k < g.n; k += 8)
      store_nibbles(data + k * 8, g.n, k, 8, [&](int c) {
        return simd::iadd(clamp_int(simd::round_int(simd::mul(g.at(c), inverse)), -8, 7), simd::iset1(8));
      });
  }
}

// Candidates c, c + 1 ... c + N - 1 for int8, which put the extreme at 127.2, 126.6 ...: their error as they would be
// stored, the least kept with its steps.
template <int N>
inline void try_int8(const Group& g, F extreme, int c, F& best, F& least) {
  F steps[N], scale[N], inverse[N], error[N];
  PE_UNROLL
  for (int n = 0; n < N; ++n) {
    const float place = 127.2f - 0.6f * static_cast<float>(c + n);
    steps[n] = simd::to_float(scale_steps(simd::mul(extreme, simd::set1(1.0f / place)), kInt8Unit));
    scale[n] = simd::mul(steps[n], simd::set1(kInt8Unit));
    inverse[n] = safe_inverse(scale[n]);
    error[n] = simd::zero();
  }
  for (int k = 0; k < g.n; ++k) {
    const F w = g.at(k), h = g.h(k);
    PE_UNROLL
    for (int n = 0; n < N; ++n) {
      const F q = clip_round<-127, 127>(simd::mul(w, inverse[n])), d = simd::sub(w, simd::mul(scale[n], q));
      error[n] = simd::fma(simd::mul(h, d), d, error[n]);
    }
  }
  PE_UNROLL
  for (int n = 0; n < N; ++n) {
    best = simd::select_lt(error[n], least, steps[n], best);
    least = simd::select_lt(error[n], least, error[n], least);
  }
}

// int8 has steps so fine that a refit gains nothing: candidates are measured as they would be stored.
inline void pack_int8(const Packed& t, uint8_t* panel, float* w, const float* importance) {
  constexpr int kPlaces = 20;
  static_assert(kPlaces % simd::kScaleCandidates == 0 && 16 % simd::kScaleCandidates == 0);
  const F amax = normalize_rows(w, t.cols), unit = simd::set1(kInt8Unit);
  simd::store(reinterpret_cast<float*>(panel), simd::mul(amax, unit));
  for (int64_t i = 0; i < t.groups; ++i) {
    const Group g = group_at(t, w, importance, i);
    const F extreme = simd::abs(extreme_of(g));
    F best = simd::zero(), least = simd::set1(__builtin_inff());
    for (int c = 0; c < kPlaces; c += simd::kScaleCandidates)
      try_int8<simd::kScaleCandidates>(g, extreme, c, best, least);
    store_steps(panel + t.scale_offset, i, simd::round_int(best));
    const F inverse = safe_inverse(simd::mul(best, unit));
    uint8_t* data = panel + t.data_offset + i * t.group * 16;
    for (int k = 0; k < g.n; k += 4) {
      I word = simd::izero();
      for (int j = 3; j >= 0; --j) {
        const I q =
            k + j < g.n ? clamp_int(simd::round_int(simd::mul(g.at(k + j), inverse)), -127, 127) : simd::izero();
        word = simd::ior(simd::shl<8>(word), simd::iadd(q, simd::iset1(128)));
      }
      simd::istore(reinterpret_cast<int32_t*>(data + k * 16), word);
    }
  }
}

// The few float32 values past the largest bfloat16 would round to infinity.
inline F bf16_range(F x) {
  const F top = simd::set1(3.3895313892515355e38f);
  return simd::min(simd::max(x, simd::sub(simd::zero(), top)), top);
}

void pack_panel(PackArgs* args) {
  PackArgs& a = *args;
  const Packed& t = *a.weight;
  float* w = a.scratch;
  transpose_rows(a, w);
  if (a.bad_row >= 0) return;
  uint8_t* panel = t.data + a.panel * t.panel_bytes;
  if (t.format == PE_INT8) return pack_int8(t, panel, w, a.importance);
  if (t.format == PE_INT4_SYM) return pack_int4_symmetric(t, panel, w, a.importance);
  if (t.format == PE_INT4_MIN) return pack_int4_minimum(t, panel, w, a.importance);
  if (t.format == PE_F32) {
    __builtin_memcpy(panel + t.data_offset, w, t.cols * kPanel * 4);
    return;
  }
  for (int64_t k = 0; k < t.padded_cols; k += 2) {  // bf16: [K/2][16][2]
    const I even = simd::shr<16>(round_bf16(bf16_range(simd::load(w + k * kPanel))));
    const I odd = k + 1 < t.cols ? round_bf16(bf16_range(simd::load(w + (k + 1) * kPanel))) : simd::izero();
    simd::istore(reinterpret_cast<int32_t*>(panel + t.data_offset) + k / 2 * kPanel, simd::ior(even, odd));
  }
}

}  // namespace
