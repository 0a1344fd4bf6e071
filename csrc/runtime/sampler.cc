// Choosing the next token: bias, penalties (in vLLM's order), temperature, top-k, top-p, min-p (in transformers'), then
// one random number that depends on (seed, step) alone. Log probabilities are of the logits before all of it.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime/program.h"

namespace pe {

namespace {

// Philox4x32-10 (Salmon et al. 2011): counter (step, 0), key seed -> a double in [0, 1).
double uniform(uint64_t seed, uint64_t step) {
  uint32_t c[4] = {static_cast<uint32_t>(step), static_cast<uint32_t>(step >> 32), 0, 0};
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c[0], b = uint64_t{0xCD9E8D57u} * c[2];
    const uint32_t n0 = static_cast<uint32_t>(b >> 32) ^ c[1] ^ k0, n2 = static_cast<uint32_t>(a >> 32) ^ c[3] ^ k1;
    c[0] = n0;
    c[1] = static_cast<uint32_t>(b);
    c[2] = n2;
    c[3] = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const uint64_t bits = (uint64_t{c[0]} << 32 | c[1]) >> 11;
  return static_cast<double>(bits) * 0x1.0p-53;
}

bool has_penalties(const pe_sampling& p) {
  return p.penalty_count > 0 &&
         (p.repetition_penalty != 1.0f || p.frequency_penalty != 0.0f || p.presence_penalty != 0.0f);
}

void apply_penalties(const pe_sampling& p, float* x) {
  for (int32_t i = 0; i < p.bias_count; ++i) x[p.bias_ids[i]] += p.bias_values[i];
  if (!has_penalties(p)) return;
  for (int32_t i = 0; i < p.penalty_count; ++i) {
    float& v = x[p.penalty_ids[i]];
    v = v > 0.0f ? v / p.repetition_penalty : v * p.repetition_penalty;
    const int32_t count = p.penalty_counts ? p.penalty_counts[i] : 0;
    if (count == 0) continue;
    v -= p.frequency_penalty * static_cast<float>(count);
    v -= p.presence_penalty;
  }
}

// Orders ids [0, n) in `order` so that the first `count` are the largest, sorted, lower id first on ties.
void largest_first(const float* x, int32_t* order, int64_t n, int64_t count) {
  const auto before = [x](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
  if (count < n) std::nth_element(order, order + count, order + n, before);
  std::sort(order, order + count, before);
}

int32_t pick(const float* x, int64_t n, const pe_sampling& p, float max, int32_t* order) {
  const double inverse = 1.0 / static_cast<double>(p.temperature);
  const auto weight = [&](int32_t i) {
    return std::exp((static_cast<double>(x[i]) - static_cast<double>(max)) * inverse);
  };
  for (int64_t i = 0; i < n; ++i) order[i] = static_cast<int32_t>(i);
  int64_t kept = n;
  if (p.top_k > 0 && p.top_k < n) {
    kept = p.top_k;
    largest_first(x, order, n, kept);
  }
  double total = 0.0;
  for (int64_t i = 0; i < kept; ++i) total += weight(order[i]);
  if (p.top_p < 1.0f) {  // the fewest, largest first, that reach top_p of the total; at least one
    const double wanted = static_cast<double>(p.top_p) * total;
    int64_t sorted = kept < n ? kept : 0, end = 0;
    double mass = 0.0;
    while (end < kept && (end == 0 || mass < wanted)) {
      if (end == sorted) {
        sorted = std::min(kept, std::max<int64_t>(256, 8 * sorted));
        largest_first(x, order, kept, sorted);
      }
      mass += weight(order[end++]);
    }
    kept = end;
    total = mass;
  }
  if (p.min_p > 0.0f) {
    total = 0.0;
    int64_t out = 0;
    for (int64_t i = 0; i < kept; ++i) {
      const double w = weight(order[i]);
      if (w < static_cast<double>(p.min_p)) continue;  // the largest weight is 1
      total += w;
      order[out++] = order[i];
    }
    kept = out;
  }
  double left = uniform(p.seed, p.step) * total;
  int32_t last = order[0];
  for (int64_t i = 0; i < kept; ++i) {
    const double w = weight(order[i]);
    if (w <= 0.0) continue;
    last = order[i];
    if (left < w) return last;
    left -= w;
  }
  return last;
}

// The `count` largest, best first, lower id first on ties.
void most_likely(const float* x, int64_t n, int32_t count, int32_t* ids) {
  int32_t kept = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (kept == count && !(x[i] > x[ids[kept - 1]])) continue;
    int32_t at = kept < count ? kept++ : kept - 1;
    for (; at > 0 && x[i] > x[ids[at - 1]]; --at) ids[at] = ids[at - 1];
    ids[at] = static_cast<int32_t>(i);
  }
}

}  // namespace

int32_t sample_row(const KernelTable& k, const float* logits, int64_t n, const pe_batch& batch, int64_t row,
                   float* work) {
  const pe_sampling* p = batch.sampling ? batch.sampling + row : nullptr;
  float max;
  int32_t finite;
  const int32_t best = k.argmax(logits, n, &max, &finite);
  const float top = max;
  int32_t id = best;
  const float* x = logits;
  if (p && (p->bias_count > 0 || has_penalties(*p))) {
    std::memcpy(work, logits, static_cast<size_t>(n) * 4);
    apply_penalties(*p, work);
    x = work;
    id = k.argmax(work, n, &max, &finite);
    if (max == -__builtin_inff()) return -1;
  }
  if (p && p->temperature > 0.0f) id = pick(x, n, *p, max, reinterpret_cast<int32_t*>(work + n));
  const int32_t target = batch.targets ? batch.targets[row] : -1;
  if (!batch.sampled_logprob && target < 0 && !batch.top_count) return id;
  const double log_sum = std::log(k.sum_exp(logits, n, top));
  const auto logprob = [&](int32_t i) {
    return static_cast<float>(static_cast<double>(logits[i]) - static_cast<double>(top) - log_sum);
  };
  if (batch.sampled_logprob) batch.sampled_logprob[row] = logprob(id);
  if (target >= 0) batch.target_logprob[row] = logprob(target);
  if (batch.top_count) {
    int32_t* ids = batch.top_ids + row * batch.top_count;
    most_likely(logits, n, batch.top_count, ids);
    for (int32_t i = 0; i < batch.top_count; ++i) batch.top_logprob[row * batch.top_count + i] = logprob(ids[i]);
  }
  return id;
}

}  // namespace pe
