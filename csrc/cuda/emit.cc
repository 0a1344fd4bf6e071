// Ops as launches. With up to 8 tokens linear has a token's bits whatever the batch; above it is cuBLASLt's.
#include <algorithm>

#include "core/status.h"
#include "cuda/program.h"

namespace pe::cuda {

namespace {

Norm norm_of(const Op& op, const OpViews& v) { return {v.norm, v.norm_bias, op.d.norm_kind, op.d.eps}; }

}  // namespace

void CudaProgram::emit(size_t i, const Shape& shape) {
  const Op& op = ops_[i];
  const OpViews& v = views_[i];
  const Stream stream = cuda_.stream();
  const Step step = step_of(shape);
  const int tokens = shape.tokens;
  switch (op.d.kind) {
    case PE_OP_EMBED: {
      const Table table = v.weight->table(), places = v.weight2 ? v.weight2->table() : Table{};
      return embed(stream, table, v.weight2 ? &places : nullptr, op.d.scale, rows_of(*op.output), step, tokens);
    }
    case PE_OP_LOAD_HIDDEN: return load(stream, hidden_, rows_of(*op.output), tokens);
    case PE_OP_NORM:
    case PE_OP_NORM_QUANTIZE: return norm(stream, rows_of(*op.input), norm_of(op, v), rows_of(*op.output), tokens);
    case PE_OP_NORM_RESIDUAL:
      return norm_residual(stream, rows_of(*op.input), norm_of(op, v), op.d.scale, rows_of(*op.output), tokens);
    case PE_OP_QUANTIZE:
      return quantize(stream, rows_of(*op.input), rows_of(*op.output), tokens * static_cast<int>(op.input->per_token));
    case PE_OP_ADD: return add(stream, rows_of(*op.input), op.d.scale, rows_of(*op.output), tokens);
    case PE_OP_ACT_MUL: return act_mul(stream, rows_of(*op.input), op.d.activation, rows_of(*op.output), tokens);
    case PE_OP_ACT: return act(stream, rows_of(*op.input), op.d.activation, rows_of(*op.output), tokens);
    case PE_OP_MASK_COLUMNS: return mask_columns(stream, v.norm, rows_of(*op.output), tokens);
    case PE_OP_GATE: return gate(stream, rows_of(*op.input), v.norm, rows_of(*op.output), tokens);
    case PE_OP_TAP:
      return tap(stream, rows_of(*op.input), op.input->per_token > 1 ? place_ : nullptr, taps_ + v.tap,
                 tokens * static_cast<int>(op.input->per_token));
    case PE_OP_DEQUANTIZE: return dequantize(stream, v.weight->matrix(), v.weight2->matrix());
    case PE_OP_LINEAR: return emit_linear(op, v, rows_of(*op.output), 0.0f, shape);
    case PE_OP_LINEAR_RESIDUAL: return emit_linear(op, v, rows_of(*op.output), op.d.scale, shape);
    case PE_OP_QK_NORM:
    case PE_OP_ROPE:
    case PE_OP_KV_APPEND: return emit_heads(op, v, rows_of(*op.input), shape);
    case PE_OP_QKV_ROPE_APPEND:
      emit_linear(op, v, rows_of(*op.output), 0.0f, shape);
      return emit_heads(op, v, rows_of(*op.output), shape);
    case PE_OP_ATTENTION:
    case PE_OP_ATTENTION_QUANTIZE: return emit_attention(op, shape);
    case PE_OP_HEAD_LINEAR:
      return head_linear(stream, v.weight->matrix(), rows_of(*op.input), op.d.heads, op.d.head_dim,
                         op.rope ? &v.rope : nullptr, rows_of(*op.output), step, tokens);
    case PE_OP_LATENT_APPEND:
      return latent_append(stream, rows_of(*op.input), v.norm, op.d.eps, v.rope, kv_view_of(op, shape), step, tokens);
    case PE_OP_GATED_FFN:
    case PE_OP_GATED_FFN_RESIDUAL:
    case PE_OP_FFN:
    case PE_OP_FFN_RESIDUAL: return emit_ffn(op, v, shape);
    case PE_OP_ROUTER: return emit_router(op, v, shape);
    case PE_OP_MOE_GATE_UP:
    case PE_OP_MOE_DOWN:
    case PE_OP_MOE_FFN_RESIDUAL: return emit_experts(op, v, shape);
    case PE_OP_LM_HEAD: return emit_head(op, v, shape);
    case PE_OP_SAMPLE: return emit_sample(shape);
    default: fail(PE_UNSUPPORTED, "op of kind %d is not in the CUDA backend", op.d.kind);
  }
}

void CudaProgram::emit_linear(const Op& op, const OpViews& v, const Rows& out, float factor, const Shape& shape) {
  Linear l;
  l.weight = v.weight->matrix();
  l.in = rows_of(*op.input);
  l.out = out;
  l.bias = v.bias;
  l.factor = factor;
  l.tokens = shape.tokens;
  linear_many(cuda_.stream(), cuda_.gemm(), l, scratch_, scratch_bytes_);
}

// What the op asks for of norms of q and k, rope and append.
void CudaProgram::emit_heads(const Op& op, const OpViews& v, const Rows& qkv, const Shape& shape) {
  FinishHeads f;
  f.heads = {op.d.heads, op.d.kv_heads, op.d.head_dim, op.k_column, op.v_column};
  f.qkv = qkv;
  f.q_norm = v.norm;
  f.k_norm = v.norm2;
  f.whole_norms = op.whole_norms;
  f.eps = op.d.eps;
  f.rope = op.rope ? &v.rope : nullptr;
  const KvView kv = op.kv ? kv_view_of(op, shape) : KvView{};
  const bool appends = op.d.kind == PE_OP_KV_APPEND || op.d.kind == PE_OP_QKV_ROPE_APPEND;
  f.kv = appends ? &kv : nullptr;
  f.tokens = shape.tokens;
  finish_heads(cuda_.stream(), f, step_of(shape));
}

Attention CudaProgram::attention_of(const Op& op, const KvView& kv, int tokens, int sequences, int partitions) const {
  Attention a;
  a.heads = op.d.heads;
  a.head_dim = op.d.head_dim;
  a.window = op.d.window;
  a.scale = op.d.scale;
  a.softcap = op.d.softcap;
  a.q = rows_of(*op.input);
  a.quantize = op.d.kind == PE_OP_ATTENTION_QUANTIZE;
  a.out = rows_of(a.quantize ? *op.scratch : *op.output);
  if (a.quantize) a.quantized = rows_of(*op.output);
  a.kv = kv;
  a.tokens = tokens;
  a.sequences = sequences;
  a.max_partitions = partitions;
  a.partials = reinterpret_cast<float*>(partials_.data());
  return a;
}

void CudaProgram::emit_attention(const Op& op, const Shape& shape) {
  attention(cuda_.stream(), attention_of(op, kv_view_of(op, shape), shape.tokens, shape.sequences, shape.partitions),
            step_of(shape));
}

Ffn CudaProgram::ffn_of(const Op& op, const OpViews& v, int tokens) const {
  Ffn f;
  f.up = v.weight->matrix();
  f.down = v.weight2->matrix();
  f.in = rows_of(*op.input);
  f.hidden = rows_of(*op.scratch);
  f.out = rows_of(*op.output);
  f.bias = v.bias;
  f.bias2 = v.bias2;
  f.activation = op.d.activation;
  f.gated = is_gated_ffn(op.d.kind);
  f.factor = ends_in_add(op.d.kind) ? op.d.scale : 0.0f;
  f.tokens = tokens;
  return f;
}

void CudaProgram::emit_ffn(const Op& op, const OpViews& v, const Shape& shape) {
  ffn_many(cuda_.stream(), cuda_.gemm(), ffn_of(op, v, shape.tokens), scratch_, scratch_bytes_);
}

// ---- experts --------------------------------------------------------------------------------------------------------

Routing CudaProgram::routing_of(const Op& op) const {
  Routing r;
  r.weights_ids = rows_of(op.d.kind == PE_OP_ROUTER ? *op.output : *op.routing);
  r.first_row = first_row_;
  r.order = order_;
  r.place = place_;
  r.counts = counts_ + op.first_expert;
  r.experts = op.d.experts;
  r.top_k = op.d.top_k;
  return r;
}

void CudaProgram::emit_router(const Op& op, const OpViews& v, const Shape& shape) {
  Router r;
  r.weight = v.weight->matrix();
  r.in = rows_of(*op.input);
  r.scores = rows_of(*op.scratch);
  r.selection_bias = v.bias;
  r.groups = op.d.groups;
  r.top_groups = op.d.top_groups;
  r.scoring = op.d.scoring;
  r.group_score = op.d.group_score;
  r.normalise = op.d.normalise;
  r.layer = op.d.layer;
  r.scale = op.d.scale;
  r.eps = op.d.eps;
  route(cuda_.stream(), r, routing_of(op), step_of(shape), shape.tokens);
}

void CudaProgram::emit_experts(const Op& op, const OpViews& v, const Shape& shape) {
  const Routing routing = routing_of(op);
  const bool up = op.d.kind != PE_OP_MOE_DOWN, down = op.d.kind != PE_OP_MOE_GATE_UP;
  const Buffer& act = !up ? *op.input : down ? *op.scratch : *op.output;
  if (up)
    moe_gate_up(cuda_.stream(), v.weight->matrix(), rows_of(*op.input), op.d.activation, rows_of(act), routing,
                shape.tokens);
  if (down)
    moe_down(cuda_.stream(), v.weight2->matrix(), rows_of(act), rows_of(*op.rows),
             ends_in_add(op.d.kind) ? op.d.scale : 0.0f, rows_of(*op.output), routing, shape.tokens);
}

// ---- ends -----------------------------------------------------------------------------------------------------------

void CudaProgram::emit_head(const Op& op, const OpViews& v, const Shape& shape) {
  if (!shape.rows) return;
  const Stream stream = cuda_.stream();
  norm(stream, rows_of(*op.input), norm_of(op, v), rows_of(head_), shape.rows, step_of(shape).logits_rows);
  Linear l;
  l.weight = v.weight->matrix();
  l.in = rows_of(head_);
  l.out = rows_of(logits_);
  l.bias = v.bias;
  l.tokens = shape.rows;
  linear_many(stream, cuda_.gemm(), l, scratch_, scratch_bytes_);
  if (op.d.softcap > 0.0f) softcap(stream, rows_of(logits_), op.d.softcap, shape.rows);
  if (!has_sample_) emit_sample(shape);  // it is what finds NaN and Inf
}

void CudaProgram::emit_sample(const Shape& shape) {
  if (!shape.rows) return;
  const StepLayout layout(shape, groups_.size(), table_width_);
  sample(cuda_.stream(), rows_of(logits_), reinterpret_cast<const SampleRow*>(step_.data() + layout.params),
         reinterpret_cast<SampleOut*>(step_.data() + layout.sampled), sample_scratch_, shape.rows);
}

}  // namespace pe::cuda
