// Creating a program: look up ids, check shapes.
#include "runtime/program.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "core/status.h"

namespace pe {

uint64_t now_ns() {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
          .count());
}

namespace {

const char* const kOpNames[] = {"embed",
                                "load_hidden",
                                "norm",
                                "quantize",
                                "linear",
                                "qk_norm",
                                "rope",
                                "kv_append",
                                "attention",
                                "add",
                                "act_mul",
                                "act",
                                "mask_columns",
                                "head_linear",
                                "latent_append",
                                "tap",
                                "dequantize",
                                "router",
                                "moe_gate_up",
                                "moe_down",
                                "gate",
                                "norm_quantize",
                                "qkv_rope_append",
                                "attention_quantize",
                                "linear_residual",
                                "norm_residual",
                                "gated_ffn",
                                "gated_ffn_residual",
                                "ffn",
                                "ffn_residual",
                                "moe_ffn_residual",
                                "lm_head",
                                "sample"};
static_assert(sizeof kOpNames / sizeof *kOpNames == PE_OP_COUNT);

constexpr int32_t kMaxBatchTokens = 1 << 20;
constexpr int64_t kMaxRows = int64_t{1} << 28;
constexpr int32_t kMaxExperts = 1 << 20;

[[noreturn]] void bad(const pe_op& d, const char* what) {
  fail(PE_REQUEST, "op %s of layer %d: %s", kOpNames[d.kind], d.layer, what);
}

void need(const pe_op& d, bool condition, const char* what) {
  if (!condition) bad(d, what);
}

}  // namespace

Program::Program(pe_backend& backend, const pe_program_desc& desc)
    : max_tokens_(desc.max_batch_tokens),
      max_sequences_(desc.max_sequences),
      timed_(desc.timed != 0),
      registry_(backend) {
  if (desc.op_count < 1 || desc.buffer_count < 1) fail(PE_REQUEST, "a program needs ops and buffers");
  if (max_tokens_ < 1 || max_tokens_ > kMaxBatchTokens || max_sequences_ < 1 || max_sequences_ > kMaxBatchTokens)
    fail(PE_REQUEST, "max_batch_tokens %d, max_sequences %d; expected 1 to %d", max_tokens_, max_sequences_,
         kMaxBatchTokens);
  buffers_.resize(static_cast<size_t>(desc.buffer_count));
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const pe_buffer_desc& d = desc.buffers[i];
    if (d.struct_size != sizeof d)
      fail(PE_REQUEST, "buffer %zu: struct_size %u; expected %zu", i, d.struct_size, sizeof d);
    if (d.width < 1 || d.width > (int64_t{1} << 31))
      fail(PE_REQUEST, "buffer %zu has width %lld", i, static_cast<long long>(d.width));
    buffers_[i].quantized = d.quantized != 0;
    buffers_[i].width = d.width;
    buffers_[i].per_token = std::max(d.rows, 1);
    if (d.rows < 0 || int64_t{max_tokens_} * buffers_[i].per_token > kMaxRows)
      fail(PE_REQUEST, "buffer %zu has %d rows a token, %d tokens; expected %lld rows at most", i, d.rows, max_tokens_,
           static_cast<long long>(kMaxRows));
    shape(buffers_[i], max_tokens_);
  }
  ops_.resize(static_cast<size_t>(desc.op_count));
  for (size_t i = 0; i < ops_.size(); ++i) {
    const pe_op& d = desc.ops[i];
    if (d.struct_size != sizeof(pe_op))
      fail(PE_REQUEST, "op %zu: struct_size %u; expected %zu", i, d.struct_size, sizeof(pe_op));
    if (d.kind < 0 || d.kind >= PE_OP_COUNT) fail(PE_UNSUPPORTED, "op %zu: kind %d is not in this backend", i, d.kind);
    resolve(d, ops_[i]);
    check(ops_[i]);
  }
  op_ns_.assign(ops_.size(), 0);
}

void Program::resolve(const pe_op& d, Op& op) {
  op.d = d;
  if ((d.kind == PE_OP_EMBED || d.kind == PE_OP_ROUTER || ends_in_add(d.kind)) && d.scale == 0.0f) op.d.scale = 1.0f;
  const auto buffer = [&](int32_t id) -> Buffer* {
    if (id < 0) return nullptr;
    if (static_cast<size_t>(id) >= buffers_.size()) bad(d, "a buffer id does not exist");
    return &buffers_[static_cast<size_t>(id)];
  };
  const auto tensor = [&](int32_t id) -> const Packed* {
    if (id < 0) return nullptr;
    const Tensor& t = registry_.tensor(id);
    held_.push_back(registry_.tensors[static_cast<size_t>(id)]);
    return &t.view();
  };
  const auto vector = [&](int32_t id, const char* what) -> const float* {
    const Packed* t = tensor(id);
    if (!t) return nullptr;
    if (t->format != PE_VECTOR_F32) bad(d, what);
    return reinterpret_cast<const float*>(t->data);
  };
  op.input = buffer(d.input);
  op.output = buffer(d.output);
  op.scratch = buffer(d.scratch);
  op.routing = buffer(d.routing);
  op.rows = buffer(d.rows);
  op.weight = tensor(d.weight);
  op.weight2 = tensor(d.weight2);
  op.bias = vector(d.bias, "the bias is not a vector");
  op.bias2 = vector(d.bias2, "the second bias is not a vector");
  op.norm = vector(d.norm, "the norm is not a vector");
  op.norm2 = vector(d.norm2, "the second norm is not a vector");
  op.norm_bias = vector(d.norm_bias, "the norm's bias is not a vector");
  if (d.rope >= 0) op.rope = &registry_.rope(d.rope);
  if (d.kv_group >= 0) op.kv = &registry_.kv(d.kv_group);
  op.k_column = static_cast<int64_t>(
      align_up(static_cast<size_t>(d.heads > 0 ? d.heads : 0) * static_cast<size_t>(std::max(d.head_dim, 0)), kPanel));
  op.v_column =
      op.k_column +
      static_cast<int64_t>(align_up(
          static_cast<size_t>(std::max(d.kv_heads, 0)) * static_cast<size_t>(std::max(d.head_dim, 0)), kPanel));
}

void Program::check_linear(const Op& op, const Packed* w, const Buffer* in, const char* what) const {
  need(op.d, w && in, what);
  need(op.d, is_packed(w->format), "the weight is not packed");
  need(op.d, is_integer(w->format) == in->quantized, "integer weights take int8 activations, float weights float32");
  need(op.d, in->width == w->cols, "the input's width differs from the weight's columns");
}

// The ops of experts and the router before them.
void Program::check_moe(Op& op) {
  const pe_op& d = op.d;
  need(d, d.experts >= 1 && d.experts <= kMaxExperts && d.top_k >= 1 && d.top_k <= d.experts,
       "needs experts, and top_k of them");
  const auto panels_of = [](const Buffer* b) { return (b->width + kPanel - 1) / kPanel; };
  if (d.kind == PE_OP_ROUTER) {
    need(d, op.weight && is_packed(op.weight->format) && !is_integer(op.weight->format) && op.weight->rows == d.experts,
         "needs a float weight of one row per expert");
    need(d, op.input && !op.input->quantized && op.input->width == op.weight->cols,
         "needs a float32 input of its width");
    need(d, op.output && !op.output->quantized && op.output->width == 2 * int64_t{d.top_k},
         "needs an output of top_k weights and ids");
    need(d, op.scratch && !op.scratch->quantized && op.scratch->width == d.experts, "needs scratch for the scores");
    need(d, d.groups >= 1 && d.experts % d.groups == 0 && d.top_groups >= 1 && d.top_groups <= d.groups,
         "the groups do not divide the experts");
    need(d, d.top_k <= d.experts / d.groups * d.top_groups, "the top groups have fewer experts than top_k");
    need(d, d.scoring == PE_SOFTMAX || d.scoring == PE_SIGMOID, "the scoring is unknown");
    need(d, d.group_score == PE_GROUP_MAX || (d.group_score == PE_GROUP_TOP2_SUM && d.experts / d.groups >= 2),
         "the score of a group is unknown, or wants two experts in a group");
    need(d, !op.bias || registry_.tensor(d.bias).view().cols == d.experts, "the selection bias's width differs");
    op.first_expert = expert_tokens_.size();
    expert_tokens_.resize(op.first_expert + static_cast<size_t>(d.experts));
    router_ = &op;
    return;
  }
  need(d,
       router_ && op.routing && op.routing == router_->output && d.experts == router_->d.experts &&
           d.top_k == router_->d.top_k,
       "needs the output of the last router before it");
  const bool up = d.kind != PE_OP_MOE_DOWN, down = d.kind != PE_OP_MOE_GATE_UP;
  const Buffer* act = !up ? op.input : down ? op.scratch : op.output;
  need(d, act && act->per_token == d.top_k, "needs a buffer of top_k rows a token for the activation");
  need(d, op.rows && !op.rows->quantized && op.rows->per_token == d.top_k, "needs float32 rows, top_k a token");
  if (up) {
    check_linear(op, op.weight, op.input, "needs gate and up, and their input");
    need(d, op.weight->panels == 2 * d.experts * panels_of(act), "gate and up do not fit the activation");
    need(d, op.rows->width == op.input->width && op.input->per_token == 1, "the rows are not the input's");
    need(d, down || !act->quantized, "needs a float32 output");
    op.gathered.quantized = op.input->quantized;
    op.gathered.width = op.input->width;
    op.gathered.per_token = d.top_k;
    shape(op.gathered, max_tokens_);
    op.rows->bytes = std::max(op.rows->bytes, op.gathered.bytes);
  }
  if (down) {
    check_linear(op, op.weight2, const_cast<Buffer*>(act), "needs down and its input");
    need(d, op.output && !op.output->quantized && op.output->per_token == 1 && op.output->width == op.rows->width,
         "needs a float32 output of the rows' width");
    need(d, op.weight2->panels == d.experts * panels_of(op.output), "down does not fit the output");
  }
}

void Program::check(Op& op) {
  const pe_op& d = op.d;
  const auto tensor_cols = [&](int32_t id) { return id < 0 ? int64_t{0} : registry_.tensor(id).view().cols; };
  const auto rows16 = [](const Packed* w) { return w->panels * kPanel; };
  const auto check_bias = [&](int32_t id, const Packed* w) {
    need(d, id < 0 || tensor_cols(id) >= rows16(w), "the bias is shorter than the weight's padded rows");
  };
  const bool two_floats = op.input && op.output && !op.input->quantized && !op.output->quantized;
  const bool of_experts = d.kind == PE_OP_MOE_GATE_UP || d.kind == PE_OP_MOE_DOWN || d.kind == PE_OP_MOE_FFN_RESIDUAL;
  for (const Buffer* b : {op.input, op.output, op.scratch, op.routing, op.rows})
    need(d, !b || b->per_token == 1 || of_experts || d.kind == PE_OP_QUANTIZE || d.kind == PE_OP_TAP,
         "takes no buffer of several rows a token");
  const auto check_heads = [&] {
    need(d, d.heads >= 1 && d.kv_heads >= 1 && d.heads % d.kv_heads == 0 && d.head_dim >= 1, "heads do not divide");
  };
  const auto check_qkv = [&](const Buffer* b) {
    check_heads();
    need(d, b && !b->quantized, "needs a float32 [q | k | v] buffer");
    const int64_t end = op.v_column + int64_t{d.kv_heads} * d.head_dim;
    need(d, b->width >= end, "the [q | k | v] buffer is too narrow");
  };
  const auto check_rope = [&] {
    need(d, op.rope && op.rope->rotary_dim % 2 == 0 && op.rope->rotary_dim <= d.head_dim,
         "the rope table does not fit the head");
  };
  const auto check_kv = [&](int32_t v_dim) {
    check_heads();
    need(d,
         op.kv && op.kv->desc().kv_heads == d.kv_heads && op.kv->desc().k_dim == d.head_dim &&
             op.kv->desc().v_dim == v_dim && d.kv_layer >= 0 && d.kv_layer < op.kv->desc().layers,
         "the KV group has another shape");
  };
  const auto check_qk_norms = [&](bool required) {
    need(d, !required || (op.norm && op.norm2), "needs the norms of q and k");
    need(d, !op.norm == !op.norm2, "one of the norms of q and k is missing");
    if (!op.norm) return;
    const int64_t q = tensor_cols(d.norm), k = tensor_cols(d.norm2), dim = d.head_dim;
    op.whole_norms = q != dim || k != dim;
    need(d, !op.whole_norms || (q == d.heads * dim && k == d.kv_heads * dim),
         "the norms of q and k have neither head_dim columns nor those of all heads");
  };
  const auto check_norm = [&] {
    need(d, op.norm && tensor_cols(d.norm) == (op.input ? op.input->width : -1), "the norm's width differs");
    need(d, d.norm_kind == PE_RMS_NORM || d.norm_kind == PE_LAYER_NORM, "the kind of norm is unknown");
    need(d, !op.norm_bias || (d.norm_kind == PE_LAYER_NORM && tensor_cols(d.norm_bias) == op.input->width),
         "only a layer norm has a bias, as wide as its input");
  };
  need(d, std::isfinite(d.scale), "the scale is not finite");
  need(d, d.softcap >= 0.0f && std::isfinite(d.softcap), "the softcap is not 0 or above, finite");
  switch (d.kind) {
    case PE_OP_EMBED:
      need(d, op.weight && op.output && !op.output->quantized && op.output->width == op.weight->cols,
           "needs a table and a float32 output of its width");
      need(d, !op.weight2 || op.weight2->cols == op.weight->cols, "the table of positions has another width");
      break;
    case PE_OP_LOAD_HIDDEN: need(d, op.output && !op.output->quantized, "needs a float32 output"); break;
    case PE_OP_NORM:
    case PE_OP_NORM_RESIDUAL:
      check_norm();
      need(d, two_floats && op.input->width == op.output->width, "shapes differ");
      need(d, d.kind == PE_OP_NORM || op.input != op.output, "a norm cannot be added to its own input");
      break;
    case PE_OP_NORM_QUANTIZE: check_norm(); [[fallthrough]];
    case PE_OP_QUANTIZE:
      need(d,
           op.input && op.output && !op.input->quantized && op.output->quantized &&
               op.input->width == op.output->width && op.input->per_token == op.output->per_token,
           "needs a float32 input and an int8 output of one width");
      break;
    case PE_OP_LINEAR:
    case PE_OP_LINEAR_RESIDUAL:
      check_linear(op, op.weight, op.input, "needs a weight and an input");
      need(d,
           op.output && !op.output->quantized && op.output->width <= rows16(op.weight) &&
               rows16(op.weight) <= static_cast<int64_t>(align_up(static_cast<size_t>(op.output->width), kPanel)),
           "the output's width differs from the weight's rows");
      check_bias(d.bias, op.weight);
      break;
    case PE_OP_QK_NORM:
      check_qkv(op.input);
      check_qk_norms(true);
      break;
    case PE_OP_ROPE:
      check_qkv(op.input);
      check_rope();
      break;
    case PE_OP_KV_APPEND:
      check_qkv(op.input);
      check_kv(d.head_dim);
      break;
    case PE_OP_QKV_ROPE_APPEND:
      check_linear(op, op.weight, op.input, "needs a weight and an input");
      check_qkv(op.output);
      check_kv(d.head_dim);
      if (op.rope) check_rope();
      check_qk_norms(false);
      check_bias(d.bias, op.weight);
      need(d, d.head_dim % kPanel == 0, "the fused form needs a head_dim of whole panels");
      need(d, op.weight->rows == int64_t{d.heads + 2 * d.kv_heads} * d.head_dim,
           "the weight's rows are not [q | k | v]");
      break;
    case PE_OP_ATTENTION:
    case PE_OP_ATTENTION_QUANTIZE: {
      const int32_t v_dim = op.kv ? op.kv->desc().v_dim : 0;
      check_kv(v_dim);
      const bool fused = d.kind == PE_OP_ATTENTION_QUANTIZE;
      const Buffer* out = fused ? op.scratch : op.output;
      const int64_t width = int64_t{d.heads} * v_dim;
      need(d, op.input && !op.input->quantized && op.input->width >= int64_t{d.heads} * d.head_dim,
           "needs the float32 q");
      need(d, out && !out->quantized && out->width == width, "needs a float32 output of heads * v_dim");
      need(d, !fused || (op.output && op.output->quantized && op.output->width == width),
           "needs an int8 output of heads * v_dim");
      need(d, d.window >= 0, "the window is negative");
      break;
    }
    case PE_OP_ADD: need(d, two_floats && op.input->width == op.output->width, "shapes differ"); break;
    case PE_OP_ACT_MUL:
      need(d,
           two_floats &&
               op.input->width == 2 * static_cast<int64_t>(align_up(static_cast<size_t>(op.output->width), kPanel)),
           "the input is not gate and up of the output, interleaved");
      break;
    case PE_OP_ACT: need(d, two_floats && op.input->width == op.output->width, "shapes differ"); break;
    case PE_OP_HEAD_LINEAR: {
      need(d, op.weight && is_packed(op.weight->format) && !is_integer(op.weight->format), "needs a float weight");
      need(d,
           two_floats && d.heads >= 1 && op.input->width >= int64_t{d.heads} * d.head_dim &&
               op.output->width % d.heads == 0,
           "needs float32 heads in and out");
      const int64_t rest = d.head_dim - op.weight->cols, rows = op.output->width / d.heads - rest;
      need(d, rest >= 0 && rows >= 1 && op.weight->panels == d.heads * ((rows + kPanel - 1) / kPanel),
           "the weight does not fit the heads");
      need(d, rest == 0 || (op.rope && op.rope->rotary_dim <= rest && op.rope->q_scales.empty()),
           "the rope table does not fit the rest of a head");
      break;
    }
    case PE_OP_LATENT_APPEND:
      check_kv(op.kv ? op.kv->desc().v_dim : 0);
      need(d,
           d.kv_heads == 1 && op.input && !op.input->quantized && op.input->width == d.head_dim && op.norm &&
               tensor_cols(d.norm) == op.kv->desc().v_dim,
           "needs a float32 row of the cache's k_dim and a norm of its v_dim");
      need(d, op.rope && op.rope->rotary_dim <= d.head_dim - op.kv->desc().v_dim,
           "the rope table does not fit the key");
      break;
    case PE_OP_MASK_COLUMNS:
      need(d, op.output && !op.output->quantized && op.norm && tensor_cols(d.norm) == op.output->width,
           "the mask's width differs");
      break;
    case PE_OP_ROUTER:
    case PE_OP_MOE_GATE_UP:
    case PE_OP_MOE_DOWN:
    case PE_OP_MOE_FFN_RESIDUAL: check_moe(op); break;
    case PE_OP_GATE:
      need(d, two_floats && op.norm && tensor_cols(d.norm) == op.input->width, "needs a weight of the input's width");
      break;
    case PE_OP_TAP:
      need(d, !op.input || op.input->per_token == 1 || router_, "rows of experts need a router before them");
      need(d, op.input && !op.input->quantized && d.head_dim >= 0, "needs a float32 input");
      tap_count_ = std::max(tap_count_, d.head_dim + 1);
      break;
    case PE_OP_DEQUANTIZE:
      need(d, op.weight && op.weight2 && is_packed(op.weight->format) && op.weight->format != PE_F32,
           "needs a packed weight other than float32, and a second one");
      need(d,
           op.weight2->format == PE_F32 && op.weight2->rows == op.weight->rows && op.weight2->cols == op.weight->cols &&
               registry_.tensor(d.weight2).writable(),
           "the second weight is not float32 of the same size that can be written");
      break;
    case PE_OP_GATED_FFN:
    case PE_OP_GATED_FFN_RESIDUAL:
    case PE_OP_FFN:
    case PE_OP_FFN_RESIDUAL:
      check_linear(op, op.weight, op.input, "needs the first matrix");
      check_linear(op, op.weight2, op.scratch, "needs down and the buffer of the activation");
      need(d,
           op.output && !op.output->quantized &&
               static_cast<int64_t>(align_up(static_cast<size_t>(op.output->width), kPanel)) == rows16(op.weight2),
           "the output's width differs from down's rows");
      need(d, op.weight->panels == (is_gated_ffn(d.kind) ? 2 : 1) * ((op.scratch->width + kPanel - 1) / kPanel),
           "the first matrix does not fit the activation");
      check_bias(d.bias, op.weight);
      check_bias(d.bias2, op.weight2);
      break;
    case PE_OP_LM_HEAD: {
      check_norm();
      need(d, !op.input->quantized && op.weight && is_packed(op.weight->format),
           "needs the hidden state, a norm and a packed weight");
      need(d, op.weight->cols == op.input->width, "shapes differ");
      need(d, !vocab_, "a program has one lm_head");
      vocab_ = static_cast<int32_t>(op.weight->rows);
      head_.width = op.input->width;
      head_.quantized = is_integer(op.weight->format);
      logits_.width = vocab_;
      break;
    }
    case PE_OP_SAMPLE:
      need(d, vocab_ > 0, "needs an lm_head before it");
      has_sample_ = true;
      break;
    default: bad(d, "not in this backend");
  }
  if (d.kind == PE_OP_ACT_MUL || d.kind == PE_OP_ACT || is_ffn(d.kind) || d.kind == PE_OP_MOE_GATE_UP ||
      d.kind == PE_OP_MOE_FFN_RESIDUAL)
    need(d, d.activation >= PE_SILU && d.activation <= PE_RELU, "the activation is unknown");
}

void Program::routing(uint64_t* tokens, int64_t* count, bool reset) {
  if (count) *count = static_cast<int64_t>(expert_tokens_.size());
  if (tokens) std::copy(expert_tokens_.begin(), expert_tokens_.end(), tokens);
  if (reset) std::fill(expert_tokens_.begin(), expert_tokens_.end(), 0);
}

void Program::times(uint64_t* op_ns, uint64_t* runs, uint64_t* run_ns, bool reset) {
  if (op_ns) std::copy(op_ns_.begin(), op_ns_.end(), op_ns);
  if (runs) *runs = runs_;
  if (run_ns) *run_ns = run_ns_;
  if (!reset) return;
  std::fill(op_ns_.begin(), op_ns_.end(), 0);
  runs_ = run_ns_ = 0;
}

}  // namespace pe
