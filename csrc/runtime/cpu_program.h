// A program on the CPU: run() executes a whole step with the threads inside from the first op to the last. cpu_plan.cc
// plans, execute.cc holds the ops, attention.cc the attention op, moe.cc those of experts, latent.cc those of latents.
#pragma once

#include <atomic>
#include <cstring>
#include <vector>

#include "core/work_share.h"
#include "runtime/program.h"

namespace pe {

// Tokens of one sequence whose query heads are handled together.
struct TokenTile {
  int32_t sequence, begin, end;
  int32_t partitions;     // up to the last token's
  int64_t first_partial;  // rows of partial results before this tile's
};

inline const CpuKvGroup& cpu_kv(const Op& op) { return static_cast<const CpuKvGroup&>(*op.kv); }

struct Tiling {
  int32_t group_heads, tile_tokens;  // query heads of one KV head that a task takes
  std::vector<TokenTile> tiles;
  int64_t partial_rows = 0, partition_tasks = 0;
};

class CpuProgram final : public Program {
 public:
  CpuProgram(pe_backend& backend, const pe_program_desc& desc);
  void run(const pe_batch& batch) override;

 private:
  // cpu_plan.cc
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
  void share(int64_t count, int64_t grain, int thread, F&& body, bool streams = false);
  template <class Last>
  void wait_for_all(int thread, const Packed* next, Last&& last, int64_t panel = 0, int64_t panels = -1);
  void inner_barrier(int thread, const Packed* next = nullptr);
  void each_token(int64_t chunk, void (CpuProgram::*body)(const Op&, int64_t, int), const Op& op, int thread,
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
  // Columns [begin, end), as far as there are so many, of `rows` rows that lie x_stride apart, into rows of `out`.
  void quantize_rows(const float* x, int64_t x_stride, int64_t begin, int64_t end, const Buffer& out, int64_t row,
                     int64_t rows);
  void activate(void (*act)(const float*, float*, int64_t, int32_t), const float* sums, int64_t sums_stride,
                int64_t wide, int32_t activation, const Buffer& out, int64_t column, int64_t row, int64_t rows);
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
  void tile_batch();
  void attention(const Op& op, int thread);
  AttentionArgs tile_rows(const Op& op, const TokenTile& tile, int64_t group, int thread);
  void attend_partition(const Op& op, const TokenTile& tile, int64_t group, int32_t partition, bool more,
                        AttentionArgs& args, float* max, float* sum, float* acc);
  void attend_tile(const Op& op, const TokenTile& tile, int64_t group, int thread);
  void merge_partials(const Op& op, const TokenTile& tile, int64_t group, int thread);
  void quantize_heads(const Op& op, const TokenTile& tile, int64_t group);

  int64_t sequence_of(int64_t token) const { return token_sequence_[static_cast<size_t>(token)]; }
  int32_t block_of(const Op& op, int64_t sequence, int64_t index) const {
    return Program::block_of(*batch_, op, sequence, index);
  }
  uint8_t* thread_scratch(int thread) const { return scratch_ + scratch_bytes_ * static_cast<size_t>(thread); }

  pe_backend& backend_;
  const KernelTable& k_;
  static constexpr int64_t kOwnTokens = 2;  // up to here norms are done by every thread
  std::vector<std::vector<Buffer>> own_;    // [norm][thread], of kOwnTokens rows
  std::vector<Tiling> tilings_;

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
  std::vector<int32_t> first_row_;  // [experts + 1]: sorted rows of expert e are first_row_[e] .. first_row_[e + 1] - 1
  std::vector<int32_t> active_;     // experts with rows, ascending
  std::vector<int32_t> order_;      // sorted -> row
  std::vector<int32_t> place_;      // row -> sorted
  WorkShare work_;
  alignas(64) std::atomic<int64_t> counter_{0};
  alignas(64) std::atomic<int32_t> status_{PE_OK};
  char message_[512] = "";
  bool stop_ = false;
  uint64_t stamp_ = 0;  // when the last timed op ended
};

// What `linear` takes of a thread's scratch.
constexpr size_t unpack_bytes(int64_t padded_cols) {
  return align_up(static_cast<size_t>(padded_cols) * kUnpacked * kPanel, kAlign);
}

// A row of attention's q as digits for an int8 cache (attention_int8-inl.h): two per column, then 12 bytes.
constexpr size_t q_digit_bytes(int32_t head_dim) {
  return align_up(2 * align_up(static_cast<size_t>(head_dim), kPanel) + 12, kAlign);
}

}  // namespace pe
