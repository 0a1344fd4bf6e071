// Attention over an int8 cache: both products are exact integer sums.
//
// K and V are stored as value + 128, one float32 scale per token and head. The float operand, a query or a row of
// weights times the scales of V, becomes 15-bit integers n = 255 high + low, both digits in -127..127: its rounding is
// 1/256 of that of the cache. The dot product is 255 sum(high * b) + sum(low * b), each sum exact.
#pragma once

namespace {

constexpr float kDigitMax = 32512.0f;  // 127 * 255 + 127
constexpr int kDigitBytes = 32;        // of 16 values: 16 high digits, 16 low ones

// What belongs to a row of digits; the kernels read digits, so this is copied in and out.
struct DigitRow {
  float scale;          // value = scale * n
  int32_t negative[2];  // -sum of the high digits, -sum of the low ones
};

struct DigitWriter {
  F by;
  I sums[2];
  explicit DigitWriter(float max) : sums{simd::izero(), simd::izero()} {
    const float inverse = max > 0.0f ? kDigitMax / max : 0.0f;
    by = simd::set1(inverse < 3.0e38f ? inverse : 0.0f);  // a row of denormals counts as 0
  }
  void put(int8_t* out, F x) {
    const F n = simd::to_float(simd::round_int(simd::mul(x, by)));
    const I high = simd::round_int(simd::mul(n, simd::set1(1.0f / 255.0f)));
    const I low = simd::round_int(simd::fma(simd::to_float(high), simd::set1(-255.0f), n));
    simd::store_low8(out, high);
    simd::store_low8(out + 16, low);
    sums[0] = simd::iadd(sums[0], high);
    sums[1] = simd::iadd(sums[1], low);
  }
  DigitRow row(float max, float poison) const {
    const float inverse = max > 0.0f ? kDigitMax / max : 0.0f;
    return {(inverse < 3.0e38f ? max / kDigitMax : 0.0f) + poison, {-reduce_add(sums[0]), -reduce_add(sums[1])}};
  }
};

// 16 values from p on, zeros past n
inline F load_part(const float* p, int64_t n) {
  if (n >= 16) return simd::load(p);
  float part[16];
  for (int i = 0; i < 16; ++i) part[i] = i < n ? p[i] : 0.0f;
  return simd::load(part);
}

// The rows of q as digits: [k_dim rounded up to 16], then the DigitRow.
void attention_q(const AttentionArgs* args) {
  const AttentionArgs& a = *args;
  if (a.dtype != PE_KV_INT8) return;
  for (int r = 0; r < a.rows; ++r) {
    const float* q = a.q + a.q_offsets[r];
    int8_t* out = a.q_digits + r * a.q_digit_stride;
    F amax = simd::zero(), poison = simd::zero();
    for (int64_t d = 0; d < a.k_dim; d += 16) {
      const F x = load_part(q + d, a.k_dim - d);
      amax = simd::max(simd::abs(x), amax);
      poison = simd::fma(x, simd::zero(), poison);
    }
    const float max = reduce_max(amax);
    DigitWriter digits(max);
    for (int64_t d = 0; d < a.k_dim; d += 16, out += kDigitBytes) digits.put(out, load_part(q + d, a.k_dim - d));
    const DigitRow row = digits.row(max, reduce_add(poison));
    __builtin_memcpy(out, &row, sizeof row);
  }
}

inline I start_digits(int32_t negative) {
  return simd::kSignedBytes ? simd::izero() : simd::shl<7>(simd::iset1(negative));
}

inline F join_digits(I high, I low) { return simd::fma(simd::to_float(high), simd::set1(255.0f), simd::to_float(low)); }

template <int R>
void score_rows_int8(const AttentionArgs& a, int row, const uint8_t* block, const uint8_t* values, float* out) {
  const int64_t quads = (a.k_dim + 3) / 4, wide = (a.k_dim + 15) / 16 * kDigitBytes;
  const int8_t* q[R];
  DigitRow rows[R];
  I high[R][2], low[R][2];
  PE_UNROLL for (int r = 0; r < R; ++r) {
    q[r] = a.q_digits + (row + r) * a.q_digit_stride;
    __builtin_memcpy(&rows[r], q[r] + wide, sizeof rows[r]);
    high[r][0] = high[r][1] = start_digits(rows[r].negative[0]);
    low[r][0] = low[r][1] = start_digits(rows[r].negative[1]);
  }
  for (int64_t d = 0; d < quads; ++d) {
    if (row == 0) {
      simd::prefetch(values + d * 128);
      simd::prefetch(values + d * 128 + 64);
    }
    const simd::B k0 = simd::bload(block + d * 128), k1 = simd::bload(block + d * 128 + 64);
    const int64_t at = d / 4 * kDigitBytes + d % 4 * 4;
    PE_UNROLL for (int r = 0; r < R; ++r) {
      high[r][0] = simd::dot4_u8(high[r][0], k0, q[r] + at);
      high[r][1] = simd::dot4_u8(high[r][1], k1, q[r] + at);
      low[r][0] = simd::dot4_u8(low[r][0], k0, q[r] + at + 16);
      low[r][1] = simd::dot4_u8(low[r][1], k1, q[r] + at + 16);
    }
  }
  const float* scales = reinterpret_cast<const float*>(block + quads * 128);
  if (row == 0) {
    simd::prefetch(values + quads * 128);
    simd::prefetch(values + quads * 128 + 64);
  }
  PE_UNROLL for (int r = 0; r < R; ++r) {
    const F scale = simd::set1(rows[r].scale * a.scale);
    PE_UNROLL for (int i = 0; i < 2; ++i) {
      const F dot = simd::mul(join_digits(high[r][i], low[r][i]), scale);
      simd::store(out + r * kPartition + 16 * i, simd::mul(dot, simd::load(scales + 16 * i)));
    }
  }
}

// Weights exp(s - max) of a row, times the scales of V, as digits in place: [256], then the DigitRow. Keys outside
// [begin, end) have digits 0, whatever an earlier owner left as their scale.
inline void weight_digits(const AttentionArgs& a, float* s, int begin, int end, int first, int last) {
  const auto scaled = [&](int k) {
    const float* scale = reinterpret_cast<const float*>(a.v_blocks[k / kKvBlock]) + k % kKvBlock;
    if (begin <= k && k + 16 <= end) return simd::mul(simd::load(s + k), simd::load(scale));
    float part[16];
    for (int i = 0; i < 16; ++i) part[i] = begin <= k + i && k + i < end ? s[k + i] * scale[i] : 0.0f;
    return simd::load(part);
  };
  F top = simd::zero(), poison = simd::zero();
  for (int k = first; k < last; k += 16) {
    const F w = scaled(k);
    simd::store(s + k, w);
    top = simd::max(w, top);
    poison = simd::fma(w, simd::zero(), poison);
  }
  const float max = reduce_max(top);
  DigitWriter digits(max);
  int8_t* out = reinterpret_cast<int8_t*>(s);
  for (int k = first; k < last; k += 16) digits.put(out + k / 16 * kDigitBytes, simd::load(s + k));
  const DigitRow row = digits.row(max, reduce_add(poison));
  __builtin_memcpy(out + kPartition / 16 * kDigitBytes, &row, sizeof row);
}

template <int R, int C>
void value_rows_int8(const AttentionArgs& a, int row, int64_t column, int first, int last) {
  const int8_t* w[R];
  DigitRow rows[R];
  I high[R][C], low[R][C];
  PE_UNROLL for (int r = 0; r < R; ++r) {
    w[r] = reinterpret_cast<const int8_t*>(a.scores + (row + r) * kPartition);
    __builtin_memcpy(&rows[r], w[r] + kPartition / 16 * kDigitBytes, sizeof rows[r]);
    PE_UNROLL for (int c = 0; c < C; ++c) {
      high[r][c] = start_digits(rows[r].negative[0]);
      low[r][c] = start_digits(rows[r].negative[1]);
    }
  }
  for (int b = first / kKvBlock; b * kKvBlock < last; ++b) {
    const int begin = b * kKvBlock < first ? first / 4 * 4 : b * kKvBlock;
    const int end = (b + 1) * kKvBlock < last ? (b + 1) * kKvBlock : last;
    const uint8_t* block = a.v_blocks[b] + kKvBlock * 4;
    const uint8_t* next = a.next_k_blocks ? a.next_k_blocks[b] : a.v_blocks[b];
    for (int k = begin; k < end; k += 4) {
      const int64_t place = ((k - b * kKvBlock) / 4 * static_cast<int64_t>(a.v_stride) + column) * 4;
      const int64_t at = k / 16 * kDigitBytes + k % 16;
      simd::B v[C];
      PE_UNROLL for (int c = 0; c < C; ++c) {
        if (row == 0) simd::prefetch(next + place + 64 * c);
        v[c] = simd::bload(block + place + 64 * c);
      }
      PE_UNROLL for (int r = 0; r < R; ++r) PE_UNROLL for (int c = 0; c < C; ++c) {
        high[r][c] = simd::dot4_u8(high[r][c], v[c], w[r] + at);
        low[r][c] = simd::dot4_u8(low[r][c], v[c], w[r] + at + 16);
      }
    }
  }
  PE_UNROLL for (int r = 0; r < R; ++r) PE_UNROLL for (int c = 0; c < C; ++c)
      simd::store(a.acc_out + (row + r) * static_cast<int64_t>(a.v_stride) + column + 16 * c,
                  simd::mul(join_digits(high[r][c], low[r][c]), simd::set1(rows[r].scale)));
}

template <int R>
void value_columns_int8(const AttentionArgs& a, int row, int first, int last) {
  int64_t c = 0;
  for (; c + 32 <= a.v_stride; c += 32) value_rows_int8<R, 2>(a, row, c, first, last);
  for (; c < a.v_stride; c += 16) value_rows_int8<R, 1>(a, row, c, first, last);
}

// One head of a token, x / scale to the nearest even, as value + 128; byte d goes where `place` says. Returns the
// scale.
template <class Place>
inline float store_int8(const float* x, int32_t dim, Place&& place) {
  F amax = simd::zero(), poison = simd::zero();
  for (int32_t d = 0; d < dim; d += 16) {
    const F v = load_part(x + d, dim - d);
    amax = simd::max(simd::abs(v), amax);
    poison = simd::fma(v, simd::zero(), poison);
  }
  const float max = reduce_max(amax), inverse = max > 0.0f ? 127.0f / max : 0.0f;
  const bool tiny = !(inverse < 3.0e38f);
  const F by = simd::set1(tiny ? 0.0f : inverse);
  for (int32_t d = 0; d < dim; d += 16) {
    int8_t q[16];
    simd::store_low8(q, simd::round_int(simd::mul(load_part(x + d, dim - d), by)));
    for (int32_t i = 0; i < 16 && d + i < dim; ++i) *place(d + i) = static_cast<uint8_t>(q[i] + 128);
  }
  return (tiny ? 0.0f : max / 127.0f) + reduce_add(poison);
}

inline void store_k_int8(const float* k, uint8_t* block, int32_t slot, int32_t dim) {
  float* scales = reinterpret_cast<float*>(block + (dim + 3) / 4 * 128);
  scales[slot] = store_int8(k, dim, [&](int32_t d) { return block + d / 4 * 128 + slot * 4 + d % 4; });
}

inline void store_v_int8(const float* v, uint8_t* block, int32_t slot, int32_t dim, int32_t stride) {
  uint8_t* rows = block + kKvBlock * 4;
  reinterpret_cast<float*>(block)[slot] =
      store_int8(v, dim, [&](int32_t d) { return rows + (slot / 4 * stride + d) * 4 + slot % 4; });
}

}  // namespace
