// Mixture of experts, by row: which experts a token goes to, and what their results are weighted with.
#pragma once

namespace {

inline F sigmoid(F x) {
  const F one = simd::set1(1.0f);
  return simd::div(one, simd::add(one, exp(simd::sub(simd::zero(), x))));
}

// y *= sigmoid(x . w): 16 partial sums, added in a fixed tree.
void gate(const float* x, const float* w, int64_t n, float* y, int64_t m) {
  F sum = simd::zero();
  const int64_t whole = n / 16 * 16;
  for (int64_t i = 0; i < whole; i += 16) sum = simd::fma(simd::load(x + i), simd::load(w + i), sum);
  float a[16] = {0}, b[16] = {0};
  for (int64_t i = whole; i < n; ++i) {
    a[i - whole] = x[i];
    b[i - whole] = w[i];
  }
  sum = simd::fma(simd::load(a), simd::load(b), sum);
  const F by = sigmoid(simd::set1(reduce_add(sum)));
  float scale[16];
  simd::store(scale, by);
  int64_t i = 0;
  for (; i + 16 <= m; i += 16) simd::store(y + i, simd::mul(simd::load(y + i), by));
  for (; i < m; ++i) y[i] = y[i] * scale[0];
}

// The index of the largest of n values, the lowest where several are; it is then out of the next search.
inline int32_t take_best(float* x, int32_t n) {
  int32_t best = 0;
  for (int32_t i = 1; i < n; ++i)
    if (x[i] > x[best]) best = i;
  x[best] = -__builtin_inff();
  return best;
}

// The score of a group of n experts: their best one's, or the sum of the best two's.
inline float group_score(const float* x, int32_t n, int32_t kind) {
  float first = x[0], second = -__builtin_inff();
  for (int32_t i = 1; i < n; ++i) {
    if (x[i] > first) {
      second = first;
      first = x[i];
    } else {
      second = fmax1(x[i], second);
    }
  }
  return kind == PE_GROUP_MAX ? first : first + second;
}

// Leaves the choice to the top_groups best groups, the lower ones where several are equal: the worst go, one by one.
inline void keep_groups(const RouteArgs& a) {
  const int32_t size = a.experts / a.groups;
  const float gone = -__builtin_inff();
  for (int32_t left = a.groups; left > a.top_groups; --left) {
    int32_t worst = -1;
    float least = 0.0f;
    for (int32_t g = 0; g < a.groups; ++g) {
      const float* x = a.choice + g * size;
      if (x[0] == gone) continue;
      const float score = group_score(x, size, a.group_score);
      if (worst >= 0 && score > least) continue;
      worst = g;
      least = score;
    }
    for (int32_t i = 0; i < size; ++i) a.choice[worst * size + i] = gone;
  }
}

int32_t route(const RouteArgs* args) {
  const RouteArgs& a = *args;
  const int32_t n = a.experts, padded = (n + 15) / 16 * 16, k = a.top_k;
  float max;
  int32_t finite;
  argmax(a.logits, n, &max, &finite);
  if (!finite) {
    for (int32_t s = 0; s < k; ++s) {
      a.out[s] = 0.0f;
      a.out[k + s] = static_cast<float>(s);
    }
    return 0;
  }
  for (int32_t i = n; i < padded; ++i) a.logits[i] = -__builtin_inff();  // exp of it is 0
  if (a.scoring == PE_SOFTMAX) {
    F sum = simd::zero();
    for (int32_t i = 0; i < padded; i += 16) {
      const F e = exp(simd::sub(simd::load(a.logits + i), simd::set1(max)));
      simd::store(a.logits + i, e);
      sum = simd::add(sum, e);
    }
    const F total = simd::set1(reduce_add(sum));
    for (int32_t i = 0; i < padded; i += 16) simd::store(a.logits + i, simd::div(simd::load(a.logits + i), total));
  } else {
    for (int32_t i = 0; i < padded; i += 16) simd::store(a.logits + i, sigmoid(simd::load(a.logits + i)));
  }
  for (int32_t i = 0; i < n; ++i) a.choice[i] = a.bias ? a.logits[i] + a.bias[i] : a.logits[i];
  if (a.top_groups < a.groups) keep_groups(a);
  float sum = 0.0f;
  for (int32_t s = 0; s < k; ++s) {
    const int32_t best = take_best(a.choice, n);
    a.out[s] = a.logits[best];
    a.out[k + s] = static_cast<float>(best);
    sum = sum + a.logits[best];
  }
  for (int32_t s = 0; s < k; ++s) a.out[s] = (a.normalise ? a.out[s] / (sum + a.eps) : a.out[s]) * a.scale;
  return 1;
}

}  // namespace
