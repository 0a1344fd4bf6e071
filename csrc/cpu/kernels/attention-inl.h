// Attention over one partition of 256 keys for a tile of query rows, and the merge of partitions.
//
// Scores: lanes are keys, one fma chain over the head's columns, ascending. Values: lanes are columns, one fma chain
// over the keys, ascending. A key outside a row's range has weight exactly 0, which changes no bit of the chain, so a
// row's result does not depend on the rows beside it.
#pragma once

namespace {

template <int DTYPE>
inline F load_kv(const uint8_t* p, int64_t i) {
  return DTYPE == PE_KV_F32 ? simd::load(reinterpret_cast<const float*>(p) + i)
                            : simd::load_bf16(reinterpret_cast<const uint16_t*>(p) + i);
}

// Calls pass.operator()<R>(row) over all rows, in as few passes as R <= MAX allows and of sizes as equal as can be.
template <int MAX, class Pass>
inline void one_pass(int rows, int row, Pass&& pass) {
  if (rows == MAX) return pass.template operator()<MAX>(row);
  if constexpr (MAX > 1) one_pass<MAX - 1>(rows, row, pass);
}

template <int MAX, class Pass>
inline void each_pass(int rows, Pass&& pass) {
  for (int row = 0, n; row < rows; row += n) {
    const int passes = (rows - row + MAX - 1) / MAX;
    n = (rows - row + passes - 1) / passes;
    one_pass<MAX>(n, row, pass);
  }
}

// What comes later is asked for while this is computed: V of a partition during its scores, the next partition's K
// during its values.
template <int DTYPE, int R>
void score_rows(const AttentionArgs& a, int row, const uint8_t* block, const uint8_t* values, float* out) {
  constexpr int64_t kLine = kKvBlock * (DTYPE == PE_KV_F32 ? 4 : 2);  // bytes of one column of K
  const float* q[R];
  F low[R], high[R];
  PE_UNROLL for (int r = 0; r < R; ++r) {
    q[r] = a.q + a.q_offsets[row + r];
    low[r] = high[r] = simd::zero();
  }
  for (int64_t d = 0; d < a.k_dim; ++d) {
    if (row == 0)
      for (int64_t i = 0; i < kLine; i += 64) simd::prefetch(values + d * kLine + i);
    const F k0 = load_kv<DTYPE>(block, d * kKvBlock), k1 = load_kv<DTYPE>(block, d * kKvBlock + 16);
    PE_UNROLL for (int r = 0; r < R; ++r) {
      const F x = simd::set1(q[r][d]);
      low[r] = simd::fma(k0, x, low[r]);
      high[r] = simd::fma(k1, x, high[r]);
    }
  }
  const F scale = simd::set1(a.scale);
  PE_UNROLL for (int r = 0; r < R; ++r) {
    simd::store(out + r * kPartition, simd::mul(low[r], scale));
    simd::store(out + r * kPartition + 16, simd::mul(high[r], scale));
  }
}

template <int DTYPE, int R, int C>
void value_rows(const AttentionArgs& a, int row, int64_t column, int first, int last) {
  constexpr int64_t kElement = DTYPE == PE_KV_F32 ? 4 : 2;
  F acc[R][C];
  PE_UNROLL for (int r = 0; r < R; ++r) PE_UNROLL for (int c = 0; c < C; ++c) acc[r][c] = simd::zero();
  const float* weights = a.scores + row * kPartition;
  for (int b = first / kKvBlock; b * kKvBlock < last; ++b) {
    const int begin = b * kKvBlock < first ? first : b * kKvBlock;
    const int end = (b + 1) * kKvBlock < last ? (b + 1) * kKvBlock : last;
    const uint8_t* next = a.next_k_blocks ? a.next_k_blocks[b] : a.v_blocks[b];
    for (int k = begin; k < end; ++k) {
      const int64_t at = (k - b * kKvBlock) * static_cast<int64_t>(a.v_stride) + column;
      if (row == 0)
        for (int64_t i = 0; i < 16 * C * kElement; i += 64) simd::prefetch(next + at * kElement + i);
      F v[C];
      PE_UNROLL for (int c = 0; c < C; ++c) v[c] = load_kv<DTYPE>(a.v_blocks[b], at + 16 * c);
      PE_UNROLL for (int r = 0; r < R; ++r) {
        const F w = simd::set1(weights[r * kPartition + k]);
        PE_UNROLL for (int c = 0; c < C; ++c) acc[r][c] = simd::fma(w, v[c], acc[r][c]);
      }
    }
  }
  PE_UNROLL for (int r = 0; r < R; ++r) PE_UNROLL for (int c = 0; c < C; ++c)
      simd::store(a.acc_out + (row + r) * static_cast<int64_t>(a.v_stride) + column + 16 * c, acc[r][c]);
}

template <int DTYPE, int R>
void value_columns(const AttentionArgs& a, int row, int first, int last) {
  int64_t c = 0;
  for (; c + 16 * simd::kValueColumns <= a.v_stride; c += 16 * simd::kValueColumns)
    value_rows<DTYPE, R, simd::kValueColumns>(a, row, c, first, last);
  for (; c < a.v_stride; c += 16) value_rows<DTYPE, R, 1>(a, row, c, first, last);
}

// Scores of one row -> weights exp(s - max), zero outside [begin, end); returns max and sum.
inline void softmax_row(float* s, int begin, int end, int first, int last, float* max_out, float* sum_out) {
  const float minus_inf = -__builtin_inff();
  if (begin >= end) {
    for (int k = first; k < last; ++k) s[k] = 0.0f;
    *max_out = minus_inf;
    *sum_out = 0.0f;
    return;
  }
  for (int k = first; k < begin; ++k) s[k] = minus_inf;
  for (int k = end; k < last; ++k) s[k] = minus_inf;
  F top = simd::set1(minus_inf);
  for (int k = first; k < last; k += 16) top = simd::max(simd::load(s + k), top);
  const float max = reduce_max(top);
  const F shift = simd::set1(max);
  F sum = simd::zero();
  for (int k = first; k < last; k += 16) {
    const F e = exp(simd::sub(simd::load(s + k), shift));
    simd::store(s + k, e);
    sum = simd::add(sum, e);
  }
  *max_out = max;
  *sum_out = reduce_add(sum);
}

template <int DTYPE>
void attention_partition(const AttentionArgs& a) {
  const int base = a.partition * kPartition;
  const auto begin_of = [&](int r) { return a.key_begin[r] > base ? a.key_begin[r] - base : 0; };
  const auto end_of = [&](int r) { return a.key_end[r] - base < kPartition ? a.key_end[r] - base : kPartition; };
  int first = kPartition, last = 0;  // wanted keys of any row, relative to the partition
  for (int r = 0; r < a.rows; ++r) {
    if (begin_of(r) >= end_of(r)) continue;
    if (begin_of(r) < first) first = begin_of(r);
    if (end_of(r) > last) last = end_of(r);
  }
  const int low = first / kKvBlock * kKvBlock, high = (last + kKvBlock - 1) / kKvBlock * kKvBlock;
  for (int b = low / kKvBlock; b * kKvBlock < high; ++b) {
    const uint8_t *keys = a.k_blocks[b], *values = a.v_blocks[b];
    float* out = a.scores + b * kKvBlock;
    if constexpr (DTYPE == PE_KV_INT8)
      each_pass<simd::kByteRows>(
          a.rows, [&]<int R>(int row) { score_rows_int8<R>(a, row, keys, values, out + row * kPartition); });
    else
      each_pass<simd::kScoreRows>(
          a.rows, [&]<int R>(int row) { score_rows<DTYPE, R>(a, row, keys, values, out + row * kPartition); });
  }
  for (int r = 0; r < a.rows; ++r) {
    float* s = a.scores + r * kPartition;
    if (a.softcap > 0.0f) softcap(s + low, high - low, a.softcap);
    softmax_row(s, begin_of(r), end_of(r), low, high, a.max_out + r, a.sum_out + r);
    if (DTYPE == PE_KV_INT8) weight_digits(a, s, begin_of(r), end_of(r), low, high);
  }
  if constexpr (DTYPE == PE_KV_INT8)
    each_pass<simd::kByteRows>(a.rows, [&]<int R>(int row) { value_columns_int8<R>(a, row, first, last); });
  else
    each_pass<simd::kValueRows>(a.rows, [&]<int R>(int row) { value_columns<DTYPE, R>(a, row, first, last); });
}

void attention(const AttentionArgs* args) {
  if (args->dtype == PE_KV_F32)
    attention_partition<PE_KV_F32>(*args);
  else if (args->dtype == PE_KV_BF16)
    attention_partition<PE_KV_BF16>(*args);
  else
    attention_partition<PE_KV_INT8>(*args);
}

// acc = acc * exp(max - m) + other * exp(other_max - m), m the larger maximum
void merge(float* max, float* sum, float* acc, float other_max, float other_sum, const float* other_acc, int64_t n) {
  if (other_sum == 0.0f && other_max == -__builtin_inff()) return;  // no key in that partition
  const float m = *max > other_max ? *max : other_max;
  float factors[16] = {*max - m, other_max - m};
  simd::store(factors, exp(simd::load(factors)));
  const F mine = simd::set1(factors[0]), other = simd::set1(factors[1]);
  for (int64_t i = 0; i < n; i += 16)
    simd::store(acc + i, simd::fma(simd::load(acc + i), mine, simd::mul(simd::load(other_acc + i), other)));
  *sum = __builtin_fmaf(*sum, factors[0], other_sum * factors[1]);
  *max = m;
}

void divide(const float* acc, float sum, float* out, int64_t n) {
  const F by = simd::set1(sum);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) simd::store(out + i, simd::div(simd::load(acc + i), by));
  for (; i < n; ++i) out[i] = acc[i] / sum;
}

inline uint16_t float_to_bf16(float x) {  // nearest even; NaN stays NaN
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((bits >> 16) | 64);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// K block [dim][32], V block [32][stride]; int8: docs/packed_formats.md. What an earlier owner left in other slots is
// never used: scores of keys outside a row's range are overwritten, and values are read only of keys that some row of
// the tile wants. So the tokens of a block may be stored in any order, by any threads.
void store_k(const float* k, uint8_t* block, int32_t slot, int32_t dim, int32_t dtype) {
  if (dtype == PE_KV_INT8) return store_k_int8(k, block, slot, dim);
  for (int32_t d = 0; d < dim; ++d) {
    if (dtype == PE_KV_F32)
      reinterpret_cast<float*>(block)[d * kKvBlock + slot] = k[d];
    else
      reinterpret_cast<uint16_t*>(block)[d * kKvBlock + slot] = float_to_bf16(k[d]);
  }
}

void store_v(const float* v, uint8_t* block, int32_t slot, int32_t dim, int32_t stride, int32_t dtype) {
  if (dtype == PE_KV_INT8) return store_v_int8(v, block, slot, dim, stride);
  for (int32_t d = 0; d < dim; ++d) {
    if (dtype == PE_KV_F32)
      reinterpret_cast<float*>(block)[slot * stride + d] = v[d];
    else
      reinterpret_cast<uint16_t*>(block)[slot * stride + d] = float_to_bf16(v[d]);
  }
}

}  // namespace
