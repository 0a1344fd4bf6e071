// Rows of floats -> groups of 64 int8 with a scale.
#pragma once

namespace {

constexpr int kVectors = kActGroup / 16, kTogether = 16;  // groups that share their reductions
constexpr int kAlone = 4;  // with fewer, each is reduced by itself: together they take as long as 16

// Lane i = the largest lane of rows[i], and a number up to which another of its lanes is: the second largest, or 0.
// Destroys rows; those from n on count as zero.
inline void top_of_rows(F* rows, int n, F& top, F& second) {
  top = second = simd::zero();
  if (n < kAlone) {
    float each[16] = {0};
    for (int i = 0; i < n; ++i) each[i] = reduce_max(rows[i]);
    top = simd::load(each);
    return;
  }
  for (int i = n; i < 16; ++i) rows[i] = simd::zero();
  simd::transpose(rows);
  for (int i = 0; i < 16; ++i) {
    second = simd::max(simd::min(top, rows[i]), second);
    top = simd::max(rows[i], top);
  }
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

// The column of the one value of size `top` that is over kOutlierRatio times every other, else -1; `below`: the largest
// of those.
inline int find_outlier(const float* x, float top, float& below) {
  int column = -1;
  below = 0.0f;
  for (int i = 0; i < kActGroup; ++i) {
    const float size = __builtin_fabsf(x[i]);
    if (size < top) below = fmax1(size, below);
    if (size != top) continue;
    if (column >= 0) return -1;  // two of that size: neither stands alone
    column = i;
  }
  return top > kOutlierRatio * below ? column : -1;
}

struct ActSource {  // of a group
  const float* x;   // 64 values
  int64_t row, index;
};

// At most 16 groups: scale = max |x| / 127, q = x / scale to the nearest even. A value over kOutlierRatio times every
// other of its group would leave them no steps: it is kept apart and the scale is the others'. A NaN or Inf makes the
// scale NaN.
inline void quantize_groups(ActSource* groups, int n, const QuantView& o) {
  alignas(64) float copies[kTogether][kActGroup];
  alignas(64) float tops[16], seconds[16], by[16], scales[16], bad[16] = {0}, scaled[3][16];
  alignas(64) int32_t sums[2][16];
  F rows[16], poison[kVectors], top, second;
  for (auto& p : poison) p = simd::zero();
  for (int i = 0; i < n; ++i) {
    F size = simd::zero();
    for (int j = 0; j < kVectors; ++j) {
      const F v = simd::load(groups[i].x + 16 * j);
      size = simd::max(size, simd::abs(v));
      poison[j] = simd::fma(v, simd::zero(), poison[j]);
    }
    rows[i] = size;
  }
  for (int j = 1; j < kVectors; ++j) poison[0] = simd::add(poison[0], poison[j]);
  if (reduce_add(poison[0]) != 0.0f) {  // NaN: in one of these groups
    for (int i = 0; i < n; ++i)
      for (int j = 0; j < kActGroup; ++j) bad[i] = __builtin_fmaf(groups[i].x[j], 0.0f, bad[i]);
  }
  top_of_rows(rows, n, top, second);
  simd::store(tops, top);
  simd::store(seconds, second);
  for (int i = 0; i < n; ++i) {
    ActSource& g = groups[i];
    uint8_t& place = o.outlier_column[g.row * o.outlier_stride + g.index];
    place = 0;
    if (!(tops[i] > kOutlierRatio * seconds[i])) continue;  // most often, and then no value stands alone
    float below;
    const int column = find_outlier(g.x, tops[i], below);
    if (column < 0) continue;
    place = static_cast<uint8_t>(column + 1);
    o.outlier_value[g.row * o.groups + g.index] = g.x[column];
    __builtin_memcpy(copies[i], g.x, sizeof copies[i]);
    copies[i][column] = 0.0f;
    g.x = copies[i];
    tops[i] = below;
  }
  const F zero = simd::zero(), max = simd::load(tops), range = simd::set1(127.0f);
  const F inverse = simd::select_lt(zero, max, simd::div(range, max), zero);
  // a row of denormals: 127 / max overflows; such values count as 0
  const F enough = simd::set1(3.0e38f);
  const F scale = simd::add(simd::select_lt(inverse, enough, simd::div(max, range), zero), simd::load(bad));
  simd::store(by, simd::select_lt(inverse, enough, inverse, zero));
  simd::store(scales, scale);
  I halves[16];  // the sum of the first 32 values, plus 65536 times that of the others
  for (int i = 0; i < n; ++i) {
    const ActSource& g = groups[i];
    int8_t* q = o.q + g.row * o.q_stride + g.index * kActGroup;
    const F factor = simd::set1(by[i]);
    I sum[2];
    for (int half = 0; half < 2; ++half) {
      const I a = simd::round_int(simd::mul(simd::load(g.x + 32 * half), factor));
      const I b = simd::round_int(simd::mul(simd::load(g.x + 32 * half + 16), factor));
      simd::store_low8(q + 32 * half, a);
      simd::store_low8(q + 32 * half + 16, b);
      sum[half] = simd::iadd(a, b);
    }
    halves[i] = simd::iadd(sum[0], simd::shl<16>(sum[1]));
  }
  simd::istore(sums[0], sum_of_rows(halves, n));
  for (int i = 0; i < n; ++i) {
    const auto first = static_cast<int16_t>(sums[0][i]);  // 32 * 127 at most
    sums[1][i] = static_cast<int32_t>(static_cast<uint32_t>(sums[0][i]) - static_cast<uint32_t>(int32_t{first})) >> 16;
    sums[0][i] = first;
  }
  const I first = simd::iload(sums[0]), rest = simd::iload(sums[1]);
  simd::store(scaled[0], simd::mul(scale, simd::to_float(first)));
  simd::store(scaled[1], simd::mul(scale, simd::to_float(rest)));
  simd::store(scaled[2], simd::mul(scale, simd::to_float(simd::iadd(first, rest))));
  for (int i = 0; i < n; ++i) {
    const int64_t at = groups[i].row * o.groups + groups[i].index;
    o.scale[at] = scales[i];
    o.negative_sum32[2 * at] = -sums[0][i];
    o.negative_sum32[2 * at + 1] = -sums[1][i];
    o.negative_sum64[at] = -(sums[0][i] + sums[1][i]);
    o.scaled_sum32[2 * at] = scaled[0][i];
    o.scaled_sum32[2 * at + 1] = scaled[1][i];
    o.scaled_sum64[at] = scaled[2][i];
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
