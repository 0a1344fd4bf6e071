// Rows of floats -> groups of 64 int8 with a scale.
#pragma once

namespace {

constexpr int kVectors = kActGroup / 16, kTogether = 16;  // groups that share their reductions
constexpr int kAlone = 4;  // with fewer, each is reduced by itself: gathering takes as long as for 16

// Lane i = the maximum over the lanes of rows[i]. Destroys rows; those from n on count as zero.
inline F max_of_rows(F* rows, int n) {
  if (n < kAlone) {
    float each[16] = {0};
    for (int i = 0; i < n; ++i) each[i] = reduce_max(rows[i]);
    return simd::load(each);
  }
  for (int i = n; i < 16; ++i) rows[i] = simd::zero();
  simd::transpose(rows);
  F all = rows[0];
  for (int i = 1; i < 16; ++i) all = simd::max(rows[i], all);
  return all;
}

// Lane i = the sum over the lanes of rows[i], likewise.
inline I sum_of_rows(I* rows, int n) {
  if (n < kAlone) {
    int32_t each[16] = {0};
    for (int i = 0; i < n; ++i) each[i] = reduce_add(rows[i]);
    return simd::iload(each);
  }
  F bits[16];
  for (int i = 0; i < 16; ++i) bits[i] = i < n ? simd::as_float(rows[i]) : simd::zero();
  simd::transpose(bits);
  I all = simd::as_int(bits[0]);
  for (int i = 1; i < 16; ++i) all = simd::iadd(all, simd::as_int(bits[i]));
  return all;
}

// The column of the one value of that size, else -1.
inline int column_of(const float* x, float size) {
  int column = -1;
  for (int i = 0; i < kActGroup; ++i) {
    if (__builtin_fabsf(x[i]) != size) continue;
    if (column >= 0) return -1;  // two of that size: neither stands alone
    column = i;
  }
  return column;
}

struct ActSource {
  const float* x;  // 64 values
  int64_t row, index;
};

// At most 16 groups: scale = max |x| / 127, q = x / scale to the nearest even. A value over kOutlierRatio times every
// other of its group would leave them no steps: it is kept apart and the scale is the others'. A NaN or Inf makes the
// scale NaN.
inline void quantize_groups(ActSource* groups, int n, const QuantView& o) {
  alignas(64) float copies[kTogether][kActGroup];
  alignas(64) float top[16], below[16], scale[16], by[16], bad[16] = {0};
  alignas(64) int32_t first[16], second[16];
  F rows[16], poison = simd::zero();
  for (int i = 0; i < n; ++i) {
    F size = simd::zero();
    for (int j = 0; j < kVectors; ++j) {
      const F v = simd::load(groups[i].x + 16 * j);
      size = simd::max(size, simd::abs(v));
      poison = simd::fma(v, simd::zero(), poison);
    }
    rows[i] = size;
  }
  simd::store(top, max_of_rows(rows, n));
  if (reduce_add(poison) != 0.0f) {  // NaN: in one of these groups
    for (int i = 0; i < n; ++i)
      for (int j = 0; j < kActGroup; ++j) bad[i] = __builtin_fmaf(groups[i].x[j], 0.0f, bad[i]);
  }
  for (int i = 0; i < n; ++i) {
    const F max = simd::set1(top[i]);
    rows[i] = simd::zero();
    for (int j = 0; j < kVectors; ++j) {
      const F size = simd::abs(simd::load(groups[i].x + 16 * j));
      rows[i] = simd::max(simd::select_lt(size, max, size, simd::zero()), rows[i]);
    }
  }
  simd::store(below, max_of_rows(rows, n));
  for (int i = 0; i < n; ++i) {
    ActSource& g = groups[i];
    uint8_t& place = o.outlier_column[g.row * o.outlier_stride + g.index];
    place = 0;
    if (!(top[i] > kOutlierRatio * below[i])) continue;
    const int column = column_of(g.x, top[i]);
    if (column < 0) continue;
    place = static_cast<uint8_t>(column + 1);
    o.outlier_value[g.row * o.groups + g.index] = g.x[column];
    __builtin_memcpy(copies[i], g.x, sizeof copies[i]);
    copies[i][column] = 0.0f;
    g.x = copies[i];
    top[i] = below[i];
  }
  const F zero = simd::zero(), max = simd::load(top), range = simd::set1(127.0f);
  const F inverse = simd::select_lt(zero, max, simd::div(range, max), zero);
  // a row of denormals: 127 / max overflows; such values count as 0
  const F enough = simd::set1(3.0e38f);
  simd::store(by, simd::select_lt(inverse, enough, inverse, zero));
  simd::store(scale, simd::add(simd::select_lt(inverse, enough, simd::div(max, range), zero), simd::load(bad)));
  I sums[2][16];
  for (int i = 0; i < n; ++i) {
    const ActSource& g = groups[i];
    int8_t* q = o.q + g.row * o.q_stride + g.index * kActGroup;
    const F factor = simd::set1(by[i]);
    for (int half = 0; half < 2; ++half) {
      const I a = simd::round_int(simd::mul(simd::load(g.x + 32 * half), factor));
      const I b = simd::round_int(simd::mul(simd::load(g.x + 32 * half + 16), factor));
      simd::store_low8(q + 32 * half, a);
      simd::store_low8(q + 32 * half + 16, b);
      sums[half][i] = simd::iadd(a, b);
    }
  }
  simd::istore(first, sum_of_rows(sums[0], n));
  simd::istore(second, sum_of_rows(sums[1], n));
  for (int i = 0; i < n; ++i) {
    const int64_t at = groups[i].row * o.groups + groups[i].index;
    o.scale[at] = scale[i];
    o.negative_sum32[2 * at] = -first[i];
    o.negative_sum32[2 * at + 1] = -second[i];
    o.negative_sum64[at] = -(first[i] + second[i]);
    o.scaled_sum32[2 * at] = scale[i] * static_cast<float>(first[i]);
    o.scaled_sum32[2 * at + 1] = scale[i] * static_cast<float>(second[i]);
    o.scaled_sum64[at] = scale[i] * static_cast<float>(first[i] + second[i]);
  }
}

// What is past the end of a row counts as 0.
void quantize(const QuantizeArgs* args) {
  const QuantizeArgs& a = *args;
  ActSource groups[kTogether];
  alignas(64) float tails[kTogether][kActGroup];
  int n = 0;
  for (int64_t r = 0; r < a.rows; ++r) {
    for (int64_t k = a.begin; k < a.end; k += kActGroup) {
      const float* x = a.x + r * a.x_stride + (k - a.begin);
      if (a.end - k < kActGroup) {
        for (int64_t i = 0; i < kActGroup; ++i) tails[n][i] = k + i < a.end ? x[i] : 0.0f;
        x = tails[n];
      }
      groups[n++] = {x, a.row + r, k / kActGroup};
      if (n == kTogether) {
        quantize_groups(groups, n, *a.out);
        n = 0;
      }
    }
  }
  if (n > 0) quantize_groups(groups, n, *a.out);
}

}  // namespace
