// Ops of multi-head latent attention (DeepSeek-AI 2024, section 2.1) in absorbed form: the cache holds one row
// [latent | rotary key] a token, which all heads share. What expands the latent into keys is multiplied into q instead,
// what expands it into values is applied after attention: both are small matrices, one a head.
#include <cstring>

#include "runtime/cpu_program.h"

namespace pe {

// Output head h = [weight of head h . first columns of input head h | the rest of the input head, rotated].
void CpuProgram::head_linear(const Op& op, int thread) {
  const Packed& w = *op.weight;
  const Buffer &in = *op.input, &out = *op.output;
  const int64_t heads = op.d.heads, panels = w.panels / heads, tokens = batch_->tokens;
  const int64_t in_head = op.d.head_dim, out_head = out.width / heads, rest = in_head - w.cols, n = out_head - rest;
  const int64_t whole = n / kPanel;  // panels that end inside the head
  float* last = reinterpret_cast<float*>(thread_scratch(thread) + unpack_bytes(w.padded_cols));
  for (int64_t h; (h = counter_.fetch_add(1, std::memory_order_relaxed)) < heads;) {
    if (cancelled()) return;
    Buffer head = in;
    head.f = in.f + h * in_head;
    float* to = out.f + h * out_head;
    if (whole) linear_range(w, head, nullptr, h * panels, h * panels + whole, to, out.stride, 0.0f, tokens, thread);
    if (whole < panels) {  // the last panel is wider than what is left of the head, and the next one is another's
      linear_range(w, head, nullptr, h * panels + whole, (h + 1) * panels, last, kPanel, 0.0f, tokens, thread);
      for (int64_t t = 0; t < tokens; ++t)
        std::memcpy(to + t * out.stride + whole * kPanel, last + t * kPanel,
                    static_cast<size_t>(n - whole * kPanel) * 4);
    }
    for (int64_t t = 0; rest > 0 && t < tokens; ++t) {
      float* tail = to + t * out.stride + n;
      std::memcpy(tail, head.row(t) + w.cols, static_cast<size_t>(rest) * 4);
      const int64_t p = batch_->positions[t];
      k_.rope(tail, op.rope->rotary_dim, op.rope->cos(p), op.rope->sin(p));
    }
  }
}

// One token of the cache: the latent normed, the key rotated; K is both, V the latent.
void CpuProgram::latent_append(const Op& op, int64_t t, int) {
  float* x = op.input->row(t);
  const pe_kv_desc& desc = op.kv->desc();
  const int32_t p = batch_->positions[t], slot = p % kKvBlock;
  const int32_t block = block_of(op, sequence_of(t), p / kKvBlock);
  k_.rms_norm(x, op.norm, x, desc.v_dim, op.d.eps);
  k_.rope(x + desc.v_dim, op.rope->rotary_dim, op.rope->cos(p), op.rope->sin(p));
  k_.store_k(x, cpu_kv(op).k(block, op.d.kv_layer, 0), slot, desc.k_dim, desc.dtype);
  k_.store_v(x, cpu_kv(op).v(block, op.d.kv_layer, 0), slot, desc.v_dim, op.kv->v_stride(), desc.dtype);
}

}  // namespace pe
