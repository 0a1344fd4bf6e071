// A program: ops checked once, one arena, and run() that executes a whole step with the threads inside from the first
// op to the last. program.cc checks, plan.cc plans; execute.cc holds the ops, attention.cc the attention op, moe.cc
// those of experts, sampler.cc sampling.
#pragma once

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "runtime/backend.h"

namespace pe {

struct Buffer {
  bool quantized = false;
  int64_t width = 0, stride = 0;  // stride in floats, or in bytes of int8
  int64_t per_token = 1;          // rows; more than one: sorted by expert (moe.cc)
  size_t bytes = 0, offset = 0;
  float* f = nullptr;
  QuantView quant{};
  float* row(int64_t t) const { return f + t * stride; }
};

constexpr bool is_gated_ffn(int32_t kind) { return kind == PE_OP_GATED_FFN || kind == PE_OP_GATED_FFN_RESIDUAL; }
constexpr bool is_ffn(int32_t kind) { return is_gated_ffn(kind) || kind == PE_OP_FFN || kind == PE_OP_FFN_RESIDUAL; }
constexpr bool ends_in_add(int32_t kind) {
  return kind == PE_OP_ADD || kind == PE_OP_LINEAR_RESIDUAL || kind == PE_OP_NORM_RESIDUAL ||
         kind == PE_OP_GATED_FFN_RESIDUAL || kind == PE_OP_FFN_RESIDUAL || kind == PE_OP_MOE_FFN_RESIDUAL;
}

// An op with its ids looked up.
struct Op {
  pe_op d{};
  Buffer *input = nullptr, *output = nullptr, *scratch = nullptr, *routing = nullptr, *rows = nullptr;
  Buffer gathered;  // in the memory of `rows`: the input's rows, sorted by expert
  const Packed *weight = nullptr, *weight2 = nullptr;
  const float *bias = nullptr, *bias2 = nullptr, *norm = nullptr, *norm2 = nullptr, *norm_bias = nullptr;
  const RopeTable* rope = nullptr;
  KvGroup* kv = nullptr;
  bool whole_norms = false;            // those of q and k are over all their heads
  int64_t k_column = 0, v_column = 0;  // of [q | k | v], each part padded to whole panels
  size_t tiling = 0;                   // index into tilings_, for attention
  int32_t group_heads = 1;             // of that tiling
  // Small batches: a norm that only the next op reads is done by every thread for itself, which saves a barrier.
  int32_t own_output = -1, own_input = -1;  // index into own_, in the norm and in the op that reads it
  const Packed* next_weight = nullptr;      // what is read from memory after this op
  size_t first_expert = 0;                  // of a router, in expert_tokens_
};

// Tokens of one sequence whose query heads are handled together.
struct TokenTile {
  int32_t sequence, begin, end;
  int32_t partitions;     // up to the last token's
  int64_t first_partial;  // rows of partial results before this tile's
};

struct Tiling {
  int32_t group_heads, tile_tokens;  // query heads of one KV head that a task takes
  std::vector<TokenTile> tiles;
  int64_t partial_rows = 0, partition_tasks = 0;
};

class Program {
 public:
  Program(pe_backend& backend, const pe_program_desc& desc);
  void run(const pe_batch& batch);  // throws Error; PE_CANCELLED when the flag was seen
  void times(uint64_t* op_ns, uint64_t* runs, uint64_t* run_ns, bool reset);
  void routing(uint64_t* tokens, int64_t* count, bool reset);

  size_t arena_bytes() const { return arena_.size(); }
  uint64_t barriers() const { return barriers_; }
  uint64_t allocations() const { return allocations_; }

 private:
  // program.cc
  void resolve(const pe_op& d, Op& op);
  void check(Op& op);
  void check_moe(Op& op);
  void check_linear(const Op& op, const Packed* weight, const Buffer* in, const char* what) const;
  void check_batch(const pe_batch& batch) const;
  void check_sampling(const pe_sampling& p) const;
  void tile_batch();

  // plan.cc
  void plan();
  void plan_small_batches();
  void plan_scratch();
  void plan_routing(const Op& op, size_t& wide);

  // execute.cc
  void execute(int thread);
  void dispatch(const Op& op, int thread);
  bool cancelled() const { return batch_->cancel && __atomic_load_n(batch_->cancel, __ATOMIC_RELAXED); }
  bool few_tokens() const { return batch_->tokens <= kOwnTokens; }
  const Buffer& source(const Op& op, int thread) const {
    return op.own_input >= 0 && few_tokens() ? own_[static_cast<size_t>(op.own_input)][static_cast<size_t>(thread)]
                                             : *op.input;
  }
  template <class F>
  void share(int64_t count, int64_t grain, int thread, F&& body, bool halving = false);
  template <class Last>
  void wait_for_all(int thread, const Packed* next, Last&& last, int64_t panel = 0, int64_t panels = -1);
  void inner_barrier(int thread, const Packed* next = nullptr);
  void each_token(int64_t chunk, void (Program::*body)(const Op&, int64_t, int), const Op& op, int thread,
                  int64_t per_token = 1);
  void normalize(const Op& op, const float* x, float* y, int64_t width);
  void norm_to(const Op& op, int64_t token, const Buffer& out, int64_t row, int thread);
  void linear_range(const Packed& w, const Buffer& in, const float* bias, int64_t begin, int64_t end, float* out,
                    int64_t stride, float factor, int64_t tokens, int thread);
  void linear(const Op& op, const Packed& w, const Buffer& in, const float* bias, const Buffer& out, float factor,
              int thread);
  void embed(const Op& op, int64_t token, int thread);
  void load_hidden(const Op& op, int64_t token, int thread);
  void norm(const Op& op, int64_t token, int thread) { norm_to(op, token, *op.output, token, thread); }
  void quantize(const Op& op, int64_t token, int thread);
  void add(const Op& op, int64_t token, int thread);
  void norm_residual(const Op& op, int64_t token, int thread);
  void act_mul(const Op& op, int64_t token, int thread);
  void act(const Op& op, int64_t token, int thread);
  void mask_columns(const Op& op, int64_t token, int thread);
  void tap(const Op& op, int64_t token, int thread);
  void gate(const Op& op, int64_t token, int thread);
  void qk_norm(const Op& op, int64_t token, int thread);
  void rope(const Op& op, int64_t token, int thread);
  void kv_append(const Op& op, int64_t token, int thread);
  void norm_head(const Op& op, int64_t token, int64_t head);
  void norm_whole(const Op& op, int64_t token);
  void rope_head(const Op& op, int64_t token, int64_t head);
  void append_head(const Op& op, int64_t token, int64_t head);
  int64_t head_column(const Op& op, int64_t head) const;
  void qkv_rope_append(const Op& op, int thread);
  void dequantize(const Op& op, int thread);
  void ffn(const Op& op, int thread);
  void lm_head(const Op& op, int thread);
  void sample(const Op& op, int thread);
  void fail_later(pe_status status, const char* format, ...) __attribute__((format(printf, 3, 4)));

  // moe.cc
  void router(const Op& op, int thread);
  void route_token(const Op& op, int64_t token, int thread);
  void finish_routing(const Op& op);
  void moe_gate_up(const Op& op, const Buffer& act, int thread);
  void moe_down(const Op& op, const Buffer& act, float factor, int thread);
  void moe_down_one(const Op& op, const Buffer& act, float factor, int thread);
  void moe_ffn(const Op& op, int thread);

  // latent.cc
  void head_linear(const Op& op, int thread);
  void latent_append(const Op& op, int64_t token, int thread);

  // attention.cc
  void attention(const Op& op, int thread);
  AttentionArgs tile_rows(const Op& op, const TokenTile& tile, int64_t group, int thread);
  void attend_partition(const Op& op, const TokenTile& tile, int64_t group, int32_t partition, bool more,
                        AttentionArgs& args, float* max, float* sum, float* acc);
  void attend_tile(const Op& op, const TokenTile& tile, int64_t group, int thread);
  void merge_partials(const Op& op, const TokenTile& tile, int64_t group, int thread);
  void quantize_heads(const Op& op, const TokenTile& tile, int64_t group);

  int64_t sequence_of(int64_t token) const { return token_sequence_[static_cast<size_t>(token)]; }
  int32_t block_of(const Op& op, int64_t sequence, int64_t index) const {
    return batch_->block_tables[op.d.kv_group][sequence * batch_->block_table_width + index];
  }
  uint8_t* thread_scratch(int thread) const { return scratch_ + scratch_bytes_ * static_cast<size_t>(thread); }

  pe_backend& backend_;
  const KernelTable& k_;
  std::vector<std::shared_ptr<Tensor>> held_;  // tensors stay alive as long as the program
  std::vector<Op> ops_;
  std::vector<Buffer> buffers_;
  static constexpr int64_t kOwnTokens = 2;  // up to here norms are done by every thread
  std::vector<std::vector<Buffer>> own_;    // [norm][thread], of kOwnTokens rows
  Buffer head_, logits_;                    // of lm_head: normed rows, logits nobody else owns
  std::vector<Tiling> tilings_;
  int32_t max_tokens_, max_sequences_, vocab_ = 0;
  bool timed_, has_sample_ = false;
  int32_t tap_count_ = 0;

  Memory arena_;
  uint8_t* scratch_ = nullptr;  // per thread
  size_t scratch_bytes_ = 0;
  size_t scores_offset_ = 0, acc_offset_ = 0, digits_offset_ = 0, rows_offset_ = 0;
  int64_t max_rows_ = 1, max_v_stride_ = kPanel;
  Memory partials_;  // of partitions in decode; grows with the context
  int64_t split_groups_ = 1;

  // of the run in progress
  const pe_batch* batch_ = nullptr;
  std::vector<int32_t> token_sequence_;
  float* logits_out_ = nullptr;
  int64_t logits_stride_ = 0;
  bool split_ = false;

  // Of the router that ran last. A row is (token, slot): token * top_k + slot.
  const Op* router_ = nullptr;      // while a program is checked: the one before the op
  std::vector<int32_t> first_row_;  // [experts + 1]: sorted rows of expert e are first_row_[e] .. first_row_[e + 1] - 1
  std::vector<int32_t> active_;     // experts with rows, ascending
  std::vector<int32_t> order_;      // sorted -> row
  std::vector<int32_t> place_;      // row -> sorted
  std::vector<uint64_t> expert_tokens_;  // of all routers, since the last reset
  alignas(64) std::atomic<int64_t> counter_{0};
  alignas(64) std::atomic<int32_t> status_{PE_OK};
  char message_[512] = "";
  bool stop_ = false;
  uint64_t barriers_ = 0, allocations_ = 0;

  std::vector<uint64_t> op_ns_;
  uint64_t runs_ = 0, run_ns_ = 0, stamp_ = 0;  // stamp_: when the last timed op ended
};

uint64_t now_ns();
void shape(Buffer& b, int64_t tokens);  // plan.cc

// What `linear` takes of a thread's scratch.
constexpr size_t unpack_bytes(int64_t padded_cols) {
  return align_up(static_cast<size_t>(padded_cols) * kUnpacked * kPanel, kAlign);
}

// A row of attention's q as digits for an int8 cache (attention_int8-inl.h): two per column, then 12 bytes.
constexpr size_t q_digit_bytes(int32_t head_dim) {
  return align_up(2 * align_up(static_cast<size_t>(head_dim), kPanel) + 12, kAlign);
}

// sampler.cc: one row; `work` has 2 * n floats. Returns the id; -1 if nothing can be chosen.
int32_t sample_row(const KernelTable& k, const float* logits, int64_t n, const pe_batch& batch, int64_t row,
                   float* work);

}  // namespace pe

struct pe_program {
  pe::Program program;
};
