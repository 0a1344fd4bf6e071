// A program: ops checked once, one arena, and run() that executes a whole step. This is what every kind of backend
// shares: program.cc checks ops, batch.cc batches, plan.cc plans the arena. cpu_program.h runs it on the CPU.
#pragma once

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
  size_t first_expert = 0;             // of a router, in expert_tokens_
  // The rest is the CPU's (cpu_plan.cc).
  size_t tiling = 0;        // index into tilings_, for attention
  int32_t group_heads = 1;  // of that tiling
  // Small batches: a norm that only the next op reads is done by every thread for itself, which saves a barrier.
  int32_t own_output = -1, own_input = -1;  // index into own_, in the norm and in the op that reads it
  const Packed* next_weight = nullptr;      // what is read from memory after this op
};

class Program {
 public:
  virtual ~Program() = default;
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  virtual void run(const pe_batch& batch) = 0;  // throws Error; PE_CANCELLED when the flag was seen
  virtual void times(uint64_t* op_ns, uint64_t* runs, uint64_t* run_ns, bool reset);
  virtual void routing(uint64_t* tokens, int64_t* count, bool reset);

  size_t arena_bytes() const { return arena_bytes_; }
  uint64_t barriers() const { return barriers_; }
  uint64_t allocations() const { return allocations_; }

 protected:
  Program(pe_backend& backend, const pe_program_desc& desc);

  void check_batch(const pe_batch& batch) const;  // batch.cc
  // plan.cc: gives buffers that are alive at the same time their own bytes of one arena; returns its size
  size_t plan_lives();
  void place_lives(uint8_t* arena);  // where the arena is now, on the CPU or on a device

  int32_t block_of(const pe_batch& batch, const Op& op, int64_t sequence, int64_t index) const {
    return batch.block_tables[op.d.kv_group][sequence * batch.block_table_width + index];
  }

  std::vector<std::shared_ptr<Tensor>> held_;  // tensors stay alive as long as the program
  std::vector<Op> ops_;
  std::vector<Buffer> buffers_;
  Buffer head_, logits_;  // of lm_head: normed rows, logits nobody else owns
  int32_t max_tokens_, max_sequences_, vocab_ = 0;
  bool timed_, has_sample_ = false;
  int32_t tap_count_ = 0;
  size_t arena_bytes_ = 0;
  std::vector<uint64_t> expert_tokens_;  // of all routers, since the last reset
  uint64_t barriers_ = 0, allocations_ = 0;
  std::vector<uint64_t> op_ns_;
  uint64_t runs_ = 0, run_ns_ = 0;

 private:
  void resolve(const pe_op& d, Op& op);
  void check(Op& op);
  void check_moe(Op& op);
  void check_linear(const Op& op, const Packed* weight, const Buffer* in, const char* what) const;
  void check_sampling(const pe_sampling& p) const;
  bool lives_in(const Buffer& b, size_t op) const;

  const pe_backend& registry_;  // of the ids
  const Op* router_ = nullptr;  // the one before the op that is checked
  std::vector<Buffer*> alive_;  // buffers that an op names
};

uint64_t now_ns();
// plan.cc: strides and bytes for so many tokens; its pointers, in memory at `base`
void shape(Buffer& b, int64_t tokens);
void place(Buffer& b, uint8_t* base, int64_t tokens);

// sampler.cc: one row; `work` has 2 * n floats. Returns the id; -1 if nothing can be chosen.
int32_t sample_row(const KernelTable& k, const float* logits, int64_t n, const pe_batch& batch, int64_t row,
                   float* work);

}  // namespace pe

struct pe_program {
  std::unique_ptr<pe::Program> program;
};
