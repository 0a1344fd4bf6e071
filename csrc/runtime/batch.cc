// Checking a batch before it runs.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/status.h"
#include "runtime/program.h"

namespace pe {

namespace {
constexpr float kMaxFloat = std::numeric_limits<float>::max();
}

void Program::check_sampling(const pe_sampling& p) const {
  if (p.struct_size != sizeof p) fail(PE_REQUEST, "sampling has struct_size %u; expected %zu", p.struct_size, sizeof p);
  const auto probability = [](float x) { return x >= 0.0f && x <= 1.0f; };
  if (!(p.temperature >= 0.0f) || std::isinf(p.temperature))
    fail(PE_REQUEST, "temperature is %g; expected 0 or more, finite", static_cast<double>(p.temperature));
  if (!probability(p.top_p) || !probability(p.min_p))
    fail(PE_REQUEST, "top_p %g, min_p %g; expected 0 to 1", static_cast<double>(p.top_p), static_cast<double>(p.min_p));
  if (!(p.repetition_penalty > 0.0f) || std::isinf(p.repetition_penalty))
    fail(PE_REQUEST, "repetition_penalty is %g; expected above 0", static_cast<double>(p.repetition_penalty));
  if (!std::isfinite(p.frequency_penalty) || !std::isfinite(p.presence_penalty))
    fail(PE_REQUEST, "frequency_penalty %g, presence_penalty %g; expected finite numbers",
         static_cast<double>(p.frequency_penalty), static_cast<double>(p.presence_penalty));
  if (p.penalty_count < 0 || p.bias_count < 0 || p.top_k < 0) fail(PE_REQUEST, "a sampling count is negative");
  for (int32_t i = 0; i < p.penalty_count; ++i)
    if (p.penalty_ids[i] < 0 || p.penalty_ids[i] >= vocab_)
      fail(PE_REQUEST, "penalty id %d; expected 0 to %d", p.penalty_ids[i], vocab_ - 1);
  for (int32_t i = 0; i < p.bias_count; ++i)
    if (p.bias_ids[i] < 0 || p.bias_ids[i] >= vocab_ || !(p.bias_values[i] <= kMaxFloat))
      fail(PE_REQUEST, "logit bias of id %d; expected ids 0 to %d, finite or -inf", p.bias_ids[i], vocab_ - 1);
}

void Program::check_batch(const pe_batch& b) const {
  if (b.tokens < 1 || b.tokens > max_tokens_)
    fail(PE_REQUEST, "batch of %d tokens; expected 1 to %d", b.tokens, max_tokens_);
  if (b.sequences < 1 || b.sequences > b.tokens)
    fail(PE_REQUEST, "batch of %d sequences with %d tokens", b.sequences, b.tokens);
  if (!b.query_start || !b.positions || b.query_start[0] != 0 || b.query_start[b.sequences] != b.tokens)
    fail(PE_REQUEST, "query_start must run from 0 to the number of tokens");
  for (int32_t s = 0; s < b.sequences; ++s) {
    const int32_t begin = b.query_start[s], end = b.query_start[s + 1];
    if (begin >= end || end > b.tokens) fail(PE_REQUEST, "sequence %d has no tokens", s);
    if (b.positions[begin] < 0) fail(PE_REQUEST, "position %d is negative", b.positions[begin]);
    for (int32_t t = begin + 1; t < end; ++t)
      if (b.positions[t] != b.positions[t - 1] + 1) fail(PE_REQUEST, "positions of sequence %d are not consecutive", s);
    const int32_t last = b.positions[end - 1];
    if (last / kKvBlock >= b.block_table_width && b.block_tables)
      fail(PE_REQUEST, "position %d is past the block table", last);
    for (const Op& op : ops_) {
      if (op.d.kind == PE_OP_EMBED && op.weight2 && last >= op.weight2->rows)
        fail(PE_REQUEST, "position %d is past the table of %lld", last, static_cast<long long>(op.weight2->rows));
      if (op.rope && last >= op.rope->positions)
        fail(PE_REQUEST, "position %d is past the rope table of %lld", last,
             static_cast<long long>(op.rope->positions));
    }
  }
  int32_t checked = -1;
  for (const Op& op : ops_) {
    if (op.d.kind == PE_OP_EMBED) {
      if (!b.token_ids) fail(PE_REQUEST, "the batch has no token ids");
      for (int32_t t = 0; t < b.tokens; ++t)
        if (b.token_ids[t] < 0 || b.token_ids[t] >= op.weight->rows)
          fail(PE_REQUEST, "token id %d; expected 0 to %lld", b.token_ids[t],
               static_cast<long long>(op.weight->rows - 1));
    }
    if (op.d.kind == PE_OP_LOAD_HIDDEN && !b.hidden) fail(PE_REQUEST, "the batch has no hidden state");
    if (!op.kv || op.d.kv_group == checked) continue;
    checked = op.d.kv_group;
    if (!b.block_tables || !b.block_tables[checked])
      fail(PE_REQUEST, "the batch has no block table for KV group %d", checked);
    for (int32_t s = 0; s < b.sequences; ++s)
      for (int32_t i = 0; i <= b.positions[b.query_start[s + 1] - 1] / kKvBlock; ++i) {
        const int32_t block = block_of(b, op, s, i);
        if (block < 0 || block >= op.kv->blocks())
          fail(PE_REQUEST, "block %d of sequence %d; the group has %d", block, s, op.kv->blocks());
      }
  }
  if (tap_count_ && !b.taps) fail(PE_REQUEST, "the batch has no room for the %d taps", tap_count_);
  if (b.logits_count < 0 || (b.logits_count > 0 && (!vocab_ || !b.logits_rows)))
    fail(PE_REQUEST, "logits_rows do not fit the program");
  if (b.logits_count > (b.logits ? max_tokens_ : max_sequences_))
    fail(PE_REQUEST, "%d logits rows are too many", b.logits_count);
  for (int32_t r = 0; r < b.logits_count; ++r) {
    if (b.logits_rows[r] < 0 || b.logits_rows[r] >= b.tokens)
      fail(PE_REQUEST, "logits row %d is not a token of the batch", b.logits_rows[r]);
    if (b.sampling && b.sampled) check_sampling(b.sampling[r]);
    if (b.targets && (b.targets[r] < -1 || b.targets[r] >= vocab_))
      fail(PE_REQUEST, "target id %d; expected -1 to %d", b.targets[r], vocab_ - 1);
  }
  if (b.top_count < 0 || b.top_count > vocab_)
    fail(PE_REQUEST, "top_count is %d; expected 0 to %d", b.top_count, vocab_);
  if ((b.targets && !b.target_logprob) || (b.top_count && (!b.top_ids || !b.top_logprob)))
    fail(PE_REQUEST, "no room for the log probabilities of targets or most likely ids");
  if ((b.targets || b.top_count) && !b.sampled)
    fail(PE_REQUEST, "targets and most likely ids are given by sampling; expected room for sampled ids");
  if (b.sampled && !has_sample_) fail(PE_REQUEST, "the program does not sample");
}

}  // namespace pe
