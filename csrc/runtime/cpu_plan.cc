// Planning a program on the CPU: every thread's scratch, and what saves barriers in decode.
#include <algorithm>

#include "runtime/cpu_program.h"

namespace pe {

namespace {
constexpr int32_t kGroupHeads = 16;  // query heads of one KV head that a thread takes at a time, at most
}  // namespace

CpuProgram::CpuProgram(pe_backend& backend, const pe_program_desc& desc)
    : Program(backend, desc), backend_(backend), k_(backend.kernels), work_(backend.team.size()) {
  token_sequence_.resize(static_cast<size_t>(max_tokens_));
  plan();
}

void CpuProgram::plan() {
  plan_small_batches();
  size_t total = plan_lives();
  const auto append = [&](Buffer& b, int64_t rows) {
    shape(b, rows);
    b.offset = total;
    total += b.bytes;
  };
  if (vocab_) {
    append(head_, max_tokens_);
    append(logits_, max_sequences_);
  }
  for (std::vector<Buffer>& threads : own_)
    for (Buffer& b : threads) append(b, kOwnTokens);
  plan_scratch();
  const size_t scratch_at = total;
  total += scratch_bytes_ * static_cast<size_t>(backend_.team.size());
  arena_ = Memory(total);
  arena_bytes_ = total;
  place_lives(arena_.data());
  if (vocab_) {
    place(head_, arena_.data(), max_tokens_);
    place(logits_, arena_.data(), max_sequences_);
  }
  for (std::vector<Buffer>& threads : own_)
    for (Buffer& b : threads) place(b, arena_.data(), kOwnTokens);
  scratch_ = arena_.data() + scratch_at;
}
// What saves barriers and waiting in decode: which norms every thread does for itself, and which weights come next.
void CpuProgram::plan_small_batches() {
  const Packed* next = nullptr;
  for (size_t i = ops_.size(); i-- > 0;) {
    ops_[i].next_weight = next;
    const int32_t kind = ops_[i].d.kind;  // which experts are read is not known before
    if (kind == PE_OP_MOE_FFN_RESIDUAL || kind == PE_OP_MOE_GATE_UP || kind == PE_OP_MOE_DOWN)
      next = nullptr;
    else if (ops_[i].weight && kind != PE_OP_EMBED)
      next = ops_[i].weight;
  }
  std::vector<const Buffer*> originals;
  const auto own = [&](const Buffer& b) {
    const auto found = std::find(originals.begin(), originals.end(), &b);
    if (found == originals.end()) {
      originals.push_back(&b);
      own_.emplace_back(static_cast<size_t>(backend_.team.size()), b);
      return static_cast<int32_t>(own_.size()) - 1;
    }
    return static_cast<int32_t>(found - originals.begin());
  };
  for (size_t i = 0; i < ops_.size(); ++i) {
    Op& op = ops_[i];
    if (op.d.kind == PE_OP_LM_HEAD) op.own_input = own(head_);
    if ((op.d.kind != PE_OP_NORM && op.d.kind != PE_OP_NORM_QUANTIZE) || op.output == op.input) continue;
    if (i + 1 == ops_.size()) continue;
    Op& reader = ops_[i + 1];
    // nobody may change the norm's input while a slow thread still reads it; the FFN does so after its own barrier
    const bool safe =
        is_ffn(reader.d.kind) ||
        ((reader.d.kind == PE_OP_LINEAR || reader.d.kind == PE_OP_QKV_ROPE_APPEND) && reader.output != op.input);
    bool alone = reader.input == op.output;
    for (size_t j = i + 2; alone && j < ops_.size() && ops_[j].output != op.output; ++j)
      alone = ops_[j].input != op.output && ops_[j].scratch != op.output;
    if (safe && alone) op.own_output = reader.own_input = own(*op.output);
  }
}

// Arrays of the ops of experts. wide: bytes of scratch behind the unpacked panels.
void CpuProgram::plan_routing(const Op& op, size_t& wide) {
  const size_t rows = static_cast<size_t>(max_tokens_) * static_cast<size_t>(op.d.top_k);
  const size_t experts = static_cast<size_t>(op.d.experts);
  if (order_.size() < rows) {
    order_.resize(rows);
    place_.resize(rows);
  }
  if (first_row_.size() <= experts) {
    first_row_.resize(experts + 1);
    active_.reserve(experts);
  }
  wide = std::max(wide, align_up(experts, kPanel) * 4);  // what experts are chosen by
  // a token's products and their sum
  if (op.output) wide = std::max(wide, 2 * align_up(static_cast<size_t>(op.output->width), kPanel) * 4);
}

// Scratch of one thread. Three users at different times: unpacked panels before a chunk of results (linear, FFN,
// lm_head), a normed row, attention; and sampling's copy of a row.
void CpuProgram::plan_scratch() {
  size_t bytes = 0, columns = 0, digit_bytes = 0, wide = 0;
  for (Op& op : ops_) {
    for (const Packed* w : {op.weight, op.weight2})
      if (w) columns = std::max(columns, static_cast<size_t>(w->padded_cols));
    if (op.input) columns = std::max(columns, static_cast<size_t>(op.input->width));
    if (op.routing || op.d.kind == PE_OP_ROUTER) plan_routing(op, wide);
    if (op.d.kind != PE_OP_ATTENTION && op.d.kind != PE_OP_ATTENTION_QUANTIZE) continue;
    const int32_t ratio = op.d.heads / op.d.kv_heads;
    int32_t heads = std::min(ratio, kGroupHeads);  // the largest divisor up to there
    while (ratio % heads) --heads;
    op.group_heads = heads;
    size_t i = 0;
    while (i < tilings_.size() && tilings_[i].group_heads != heads) ++i;
    if (i == tilings_.size()) {
      Tiling t{heads, std::max(1, 32 / heads), {}, 0, 0};
      t.tiles.reserve(static_cast<size_t>(max_tokens_));
      tilings_.push_back(std::move(t));
    }
    op.tiling = i;
    max_rows_ = std::max(max_rows_, int64_t{tilings_[i].tile_tokens} * heads);
    max_v_stride_ = std::max(max_v_stride_, int64_t{op.kv->v_stride()});
    split_groups_ = std::max(split_groups_, int64_t{op.d.heads / heads});
    if (op.kv->desc().dtype == PE_KV_INT8) digit_bytes = std::max(digit_bytes, q_digit_bytes(op.d.head_dim));
  }
  const size_t results = static_cast<size_t>(max_tokens_ + kTileTokens) * 8 * kPanel * 4;
  bytes = unpack_bytes(static_cast<int64_t>(columns)) + std::max(results, wide);
  bytes = std::max(bytes, columns * 4 + kAlign);
  if (has_sample_) bytes = std::max(bytes, static_cast<size_t>(vocab_) * 8 + kAlign);
  const size_t rows = static_cast<size_t>(max_rows_);
  scores_offset_ = 0;
  acc_offset_ = rows * kPartition * 4;
  digits_offset_ = acc_offset_ + 2 * rows * static_cast<size_t>(max_v_stride_) * 4;
  rows_offset_ = digits_offset_ + rows * digit_bytes;
  bytes = std::max(bytes, rows_offset_ + rows * (8 + 4 * 6));
  scratch_bytes_ = align_up(bytes, 4096);
}

}  // namespace pe
