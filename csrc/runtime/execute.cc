// Running a program: every op but attention and mixtures of experts.
#include <cstdarg>
#include <cstdio>

#include "core/status.h"
#include "runtime/cpu_program.h"
#include "runtime/share.h"

namespace pe {

namespace {
void scale_row(float* x, int64_t n, float by) {
  for (int64_t i = 0; by != 1.0f && i < n; ++i) x[i] *= by;
}
}  // namespace

void CpuProgram::run(const pe_batch& batch) {
  const uint64_t start = now_ns();
  batch_ = &batch;
  check_batch(batch);
  for (int32_t s = 0; s < batch.sequences; ++s)
    std::fill(token_sequence_.begin() + batch.query_start[s], token_sequence_.begin() + batch.query_start[s + 1], s);
  tile_batch();
  logits_out_ = batch.logits ? batch.logits : logits_.f;
  logits_stride_ = batch.logits ? vocab_ : logits_.stride;
  counter_.store(0, std::memory_order_relaxed);
  status_.store(PE_OK, std::memory_order_relaxed);
  stop_ = false;
  stamp_ = start;
  backend_.team.run([this](int thread) { execute(thread); });
  batch_ = nullptr;
  ++runs_;
  run_ns_ += now_ns() - start;
  const auto status = static_cast<pe_status>(status_.load());
  if (status != PE_OK) throw Error(status, message_);
}

void CpuProgram::execute(int thread) {
  const bool stamp = timed_ && thread == 0;
  for (size_t i = 0; i < ops_.size(); ++i) {
    const Op& op = ops_[i];
    if (op.own_output >= 0 && few_tokens()) {
      const Buffer& own = own_[static_cast<size_t>(op.own_output)][static_cast<size_t>(thread)];
      for (int64_t t = 0; t < batch_->tokens; ++t) norm_to(op, t, own, t, thread);
    } else {
      dispatch(op, thread);
      // The last to arrive decides for all, so that no thread leaves alone.
      wait_for_all(thread, op.next_weight, [this, &op] {
        if (op.d.kind == PE_OP_ROUTER) finish_routing(op);
        if (cancelled()) fail_later(PE_CANCELLED, "cancelled");
        stop_ = status_.load(std::memory_order_relaxed) != PE_OK;
      });
    }
    if (stamp) {
      const uint64_t after = now_ns();  // the first op starts with the run: checking the batch, waking the threads
      op_ns_[i] += after - stamp_;
      stamp_ = after;
    }
    if (stop_) return;
  }
}

void CpuProgram::inner_barrier(int thread, const Packed* next) {
  wait_for_all(thread, next, [] {});
}

// Keeps the first failure; the run ends at the next op border.
void CpuProgram::fail_later(pe_status status, const char* format, ...) {
  int32_t expected = PE_OK;
  if (!status_.compare_exchange_strong(expected, status)) return;
  va_list args;
  va_start(args, format);
  std::vsnprintf(message_, sizeof message_, format, args);
  va_end(args);
}

void CpuProgram::each_token(int64_t chunk, void (CpuProgram::*body)(const Op&, int64_t, int), const Op& op, int thread,
                            int64_t per_token) {
  share(batch_->tokens * per_token, chunk, thread, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) (this->*body)(op, t, thread);
  });
}

void CpuProgram::dispatch(const Op& op, int thread) {
  switch (op.d.kind) {
    case PE_OP_EMBED: return each_token(4, &CpuProgram::embed, op, thread);
    case PE_OP_LOAD_HIDDEN: return each_token(4, &CpuProgram::load_hidden, op, thread);
    case PE_OP_NORM:
    case PE_OP_NORM_QUANTIZE: return each_token(4, &CpuProgram::norm, op, thread);
    case PE_OP_QUANTIZE: return each_token(4, &CpuProgram::quantize, op, thread, op.input->per_token);
    case PE_OP_ADD: return each_token(4, &CpuProgram::add, op, thread);
    case PE_OP_NORM_RESIDUAL: return each_token(4, &CpuProgram::norm_residual, op, thread);
    case PE_OP_ACT_MUL: return each_token(1, &CpuProgram::act_mul, op, thread);
    case PE_OP_ACT: return each_token(1, &CpuProgram::act, op, thread);
    case PE_OP_MASK_COLUMNS: return each_token(4, &CpuProgram::mask_columns, op, thread);
    case PE_OP_HEAD_LINEAR: return head_linear(op, thread);
    case PE_OP_LATENT_APPEND: return each_token(1, &CpuProgram::latent_append, op, thread);
    case PE_OP_TAP: return each_token(4, &CpuProgram::tap, op, thread);
    case PE_OP_DEQUANTIZE: return dequantize(op, thread);
    case PE_OP_ROUTER: return router(op, thread);
    case PE_OP_MOE_GATE_UP: return moe_gate_up(op, *op.output, thread);
    case PE_OP_MOE_DOWN: return moe_down(op, *op.input, 0.0f, thread);
    case PE_OP_GATE: return each_token(4, &CpuProgram::gate, op, thread);
    case PE_OP_QK_NORM: return each_token(1, &CpuProgram::qk_norm, op, thread);
    case PE_OP_ROPE: return each_token(1, &CpuProgram::rope, op, thread);
    case PE_OP_KV_APPEND: return each_token(1, &CpuProgram::kv_append, op, thread);
    case PE_OP_LINEAR: return linear(op, *op.weight, source(op, thread), op.bias, *op.output, 0.0f, thread);
    case PE_OP_LINEAR_RESIDUAL: return linear(op, *op.weight, *op.input, op.bias, *op.output, op.d.scale, thread);
    case PE_OP_QKV_ROPE_APPEND: return qkv_rope_append(op, thread);
    case PE_OP_ATTENTION:
    case PE_OP_ATTENTION_QUANTIZE: return attention(op, thread);
    case PE_OP_GATED_FFN:
    case PE_OP_GATED_FFN_RESIDUAL:
    case PE_OP_FFN:
    case PE_OP_FFN_RESIDUAL: return ffn(op, thread);
    case PE_OP_MOE_FFN_RESIDUAL: return moe_ffn(op, thread);
    case PE_OP_LM_HEAD: return lm_head(op, thread);
    case PE_OP_SAMPLE: return sample(op, thread);
    default: return;  // creation refused it
  }
}

// ---- rows -----------------------------------------------------------------------------------------------------------

void CpuProgram::embed(const Op& op, int64_t t, int thread) {
  float* row = op.output->row(t);
  k_.gather_row(op.weight, batch_->token_ids[t], row);
  scale_row(row, op.output->width, op.d.scale);
  if (!op.weight2) return;
  float* place = reinterpret_cast<float*>(thread_scratch(thread));
  k_.gather_row(op.weight2, batch_->positions[t], place);
  k_.add(place, row, op.output->width, 1.0f);
}

void CpuProgram::load_hidden(const Op& op, int64_t t, int) {
  std::memcpy(op.output->row(t), batch_->hidden + t * op.output->width, static_cast<size_t>(op.output->width) * 4);
}

void CpuProgram::normalize(const Op& op, const float* x, float* y, int64_t width) {
  if (op.d.norm_kind == PE_LAYER_NORM)
    k_.layer_norm(x, op.norm, op.norm_bias, y, width, op.d.eps);
  else
    k_.rms_norm(x, op.norm, y, width, op.d.eps);
}

void CpuProgram::norm_to(const Op& op, int64_t t, const Buffer& out, int64_t row, int thread) {
  const float* x = op.input->row(t);
  const int64_t width = op.input->width;
  if (!out.quantized) return normalize(op, x, out.row(row), width);
  float* normed = reinterpret_cast<float*>(thread_scratch(thread));
  normalize(op, x, normed, width);
  quantize_rows(normed, 0, 0, width, out, row, 1);
}

void CpuProgram::quantize_rows(const float* x, int64_t x_stride, int64_t begin, int64_t end, const Buffer& out,
                               int64_t row, int64_t rows) {
  const QuantizeArgs args{x, x_stride, begin, std::min(end, out.width), &out.quant, row, rows};
  k_.quantize(&args);
}

void CpuProgram::quantize(const Op& op, int64_t t, int) {
  quantize_rows(op.input->row(t), 0, 0, op.input->width, *op.output, t, 1);
}

void CpuProgram::add(const Op& op, int64_t t, int) {
  k_.add(op.input->row(t), op.output->row(t), op.input->width, op.d.scale);
}

void CpuProgram::norm_residual(const Op& op, int64_t t, int thread) {
  float* normed = reinterpret_cast<float*>(thread_scratch(thread));
  normalize(op, op.input->row(t), normed, op.input->width);
  k_.add(normed, op.output->row(t), op.input->width, op.d.scale);
}

void CpuProgram::act_mul(const Op& op, int64_t t, int) {
  k_.act_mul(op.input->row(t), op.output->row(t), op.input->width / 2, op.d.activation);
}

void CpuProgram::act(const Op& op, int64_t t, int) {
  const auto wide = static_cast<int64_t>(align_up(static_cast<size_t>(op.input->width), kPanel));
  k_.act(op.input->row(t), op.output->row(t), wide, op.d.activation);
}

void CpuProgram::mask_columns(const Op& op, int64_t t, int) {
  float* row = op.output->row(t);
  for (int64_t i = 0; i < op.output->width; ++i)
    if (op.norm[i] == 0.0f) row[i] = 0.0f;
}

void CpuProgram::tap(const Op& op, int64_t t, int) {
  const Buffer& b = *op.input;
  for (int64_t r = t * b.per_token; r < (t + 1) * b.per_token; ++r)
    std::memcpy(batch_->taps[op.d.head_dim] + r * b.width, b.row(b.per_token > 1 ? place_[static_cast<size_t>(r)] : r),
                static_cast<size_t>(b.width) * 4);
}

void CpuProgram::gate(const Op& op, int64_t t, int) {
  k_.gate(op.input->row(t), op.norm, op.input->width, op.output->row(t), op.output->width);
}

// ---- heads: q heads first, then k, then v
// ----------------------------------------------------------------------------

int64_t CpuProgram::head_column(const Op& op, int64_t head) const {
  const int64_t heads = op.d.heads, kv = op.d.kv_heads, dim = op.d.head_dim;
  if (head < heads) return head * dim;
  return head < heads + kv ? op.k_column + (head - heads) * dim : op.v_column + (head - heads - kv) * dim;
}

void CpuProgram::norm_head(const Op& op, int64_t t, int64_t head) {
  const Buffer& b = op.d.kind == PE_OP_QK_NORM ? *op.input : *op.output;
  float* x = b.row(t) + head_column(op, head);
  k_.rms_norm(x, head < op.d.heads ? op.norm : op.norm2, x, op.d.head_dim, op.d.eps);
}

void CpuProgram::norm_whole(const Op& op, int64_t t) {
  float* x = (op.d.kind == PE_OP_QK_NORM ? *op.input : *op.output).row(t);
  k_.rms_norm(x, op.norm, x, int64_t{op.d.heads} * op.d.head_dim, op.d.eps);
  k_.rms_norm(x + op.k_column, op.norm2, x + op.k_column, int64_t{op.d.kv_heads} * op.d.head_dim, op.d.eps);
}

void CpuProgram::rope_head(const Op& op, int64_t t, int64_t head) {
  const Buffer& b = op.d.kind == PE_OP_ROPE ? *op.input : *op.output;
  const int64_t p = batch_->positions[t];
  float* x = b.row(t) + head_column(op, head);
  k_.rope(x, op.rope->rotary_dim, op.rope->cos(p), op.rope->sin(p));
  if (head < op.d.heads) scale_row(x, op.d.head_dim, op.rope->q_scale(p));
}

void CpuProgram::append_head(const Op& op, int64_t t, int64_t head) {
  const Buffer& b = op.d.kind == PE_OP_KV_APPEND ? *op.input : *op.output;
  const float* x = b.row(t) + head_column(op, head);
  const int32_t p = batch_->positions[t], slot = p % kKvBlock;
  const int32_t block = block_of(op, sequence_of(t), p / kKvBlock);
  const auto kv_head = static_cast<int32_t>((head - op.d.heads) % op.d.kv_heads);
  const pe_kv_desc& desc = op.kv->desc();
  if (head < op.d.heads + op.d.kv_heads)
    k_.store_k(x, cpu_kv(op).k(block, op.d.kv_layer, kv_head), slot, desc.k_dim, desc.dtype);
  else
    k_.store_v(x, cpu_kv(op).v(block, op.d.kv_layer, kv_head), slot, desc.v_dim, op.kv->v_stride(), desc.dtype);
}

void CpuProgram::qk_norm(const Op& op, int64_t t, int) {
  if (op.whole_norms) return norm_whole(op, t);
  for (int64_t h = 0; h < op.d.heads + op.d.kv_heads; ++h) norm_head(op, t, h);
}

void CpuProgram::rope(const Op& op, int64_t t, int) {
  for (int64_t h = 0; h < op.d.heads + op.d.kv_heads; ++h) rope_head(op, t, h);
}

void CpuProgram::kv_append(const Op& op, int64_t t, int) {
  for (int64_t h = op.d.heads; h < op.d.heads + 2 * op.d.kv_heads; ++h) append_head(op, t, h);
}

void CpuProgram::qkv_rope_append(const Op& op, int thread) {
  const int64_t q = op.d.heads, kv = op.d.kv_heads, panels = op.d.head_dim / kPanel;
  const Buffer& in = source(op, thread);
  const auto finish_head = [&](int64_t t, int64_t h) {
    if (h < q + kv) {
      if (op.norm && !op.whole_norms) norm_head(op, t, h);
      if (op.rope) rope_head(op, t, h);
    }
    if (h >= q) append_head(op, t, h);
  };
  const auto heads = [&](int64_t begin, int64_t end) {
    for (int64_t h = begin; h < end; ++h) {
      linear_range(*op.weight, in, op.bias, h * panels, (h + 1) * panels, op.output->f + head_column(op, h),
                   op.output->stride, 0.0f, batch_->tokens, thread);
      for (int64_t t = 0; !op.whole_norms && t < batch_->tokens; ++t) finish_head(t, h);
    }
  };
  share(q + 2 * kv, 1, thread, heads, batch_->tokens <= kGemvTokens);
  if (!op.whole_norms) return;
  inner_barrier(thread, op.next_weight);
  share(batch_->tokens, 1, thread, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      norm_whole(op, t);
      for (int64_t h = 0; h < q + 2 * kv; ++h) finish_head(t, h);
    }
  });
}

// ---- matrices -------------------------------------------------------------------------------------------------------

void CpuProgram::linear_range(const Packed& w, const Buffer& in, const float* bias, int64_t begin, int64_t end,
                              float* out, int64_t stride, float factor, int64_t tokens, int thread) {
  LinearArgs a{};
  a.weight = &w;
  a.panel_begin = begin;
  a.panel_end = end;
  a.tokens = tokens;
  a.quant = in.quant;
  a.x = in.f;
  a.x_stride = in.stride;
  a.bias = bias;
  a.out = out;
  a.out_stride = stride;
  a.factor = factor;
  a.scratch = thread_scratch(thread);
  k_.linear(&a);
}

void CpuProgram::linear(const Op&, const Packed& w, const Buffer& in, const float* bias, const Buffer& out,
                        float factor, int thread) {
  const auto panels = [&](int64_t begin, int64_t end) {
    linear_range(w, in, bias, begin, end, out.f + begin * kPanel, out.stride, factor, batch_->tokens, thread);
  };
  share(w.panels, 2, thread, panels, batch_->tokens <= kGemvTokens);
}

void CpuProgram::dequantize(const Op& op, int thread) {
  const Packed& out = *op.weight2;
  share(out.panels, 2, thread, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p)
      k_.dequantize(op.weight, p,
                    reinterpret_cast<float*>(out.data + static_cast<size_t>(p) * out.panel_bytes + out.data_offset));
  });
}

// 64 columns of a hidden layer, from the sums of `rows` tokens: activated, and rounded where the buffer is int8.
void CpuProgram::activate(void (*act)(const float*, float*, int64_t, int32_t), const float* sums, int64_t sums_stride,
                          int64_t wide, int32_t activation, const Buffer& out, int64_t column, int64_t row,
                          int64_t rows) {
  constexpr int64_t kRows = 16;
  if (!out.quantized) {
    for (int64_t r = 0; r < rows; ++r) act(sums + r * sums_stride, out.row(row + r) + column, wide, activation);
    return;
  }
  float values[kRows * kActGroup];
  for (int64_t first = 0; first < rows; first += kRows) {
    const int64_t some = std::min(kRows, rows - first);
    for (int64_t r = 0; r < some; ++r) act(sums + (first + r) * sums_stride, values + r * kActGroup, wide, activation);
    quantize_rows(values, kActGroup, column, column + kActGroup, out, row + first, some);
  }
}

// The first matrix (gate and up, or up alone) for 64 intermediate columns at a time: the float sums stay in this
// thread's cache, and leave it as one finished group of int8 (or as floats, for float weights). Then down, after one
// barrier.
void CpuProgram::ffn(const Op& op, int thread) {
  const Buffer &h = *op.scratch, &in = source(op, thread);
  const int64_t units = (h.width + kActGroup - 1) / kActGroup, tokens = batch_->tokens;
  const bool gated = is_gated_ffn(op.d.kind);
  const int64_t sides = gated ? 2 : 1, columns = sides * kActGroup;  // of the first matrix, in a unit
  float* sums = reinterpret_cast<float*>(thread_scratch(thread) + unpack_bytes(op.weight->padded_cols));
  const auto first_matrix = [&](int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; ++u) {
      const int64_t first = u * columns / kPanel, last = std::min(first + columns / kPanel, op.weight->panels);
      linear_range(*op.weight, in, op.bias, first, last, sums, columns, 0.0f, tokens, thread);
      const int64_t column = u * kActGroup, wide = (last - first) / sides * kPanel;
      activate(gated ? k_.act_mul : k_.act, sums, columns, wide, op.d.activation, h, column, 0, tokens);
    }
  };
  share(units, 1, thread, first_matrix, tokens <= kGemvTokens);
  inner_barrier(thread, op.weight2);
  linear(op, *op.weight2, h, op.bias2, *op.output, ends_in_add(op.d.kind) ? op.d.scale : 0.0f, thread);
}

void CpuProgram::lm_head(const Op& op, int thread) {
  const int64_t rows = batch_->logits_count;
  if (rows == 0) return;
  const Packed& w = *op.weight;
  const Buffer* in = &head_;
  if (rows <= kOwnTokens) {
    in = &own_[static_cast<size_t>(op.own_input)][static_cast<size_t>(thread)];
    for (int64_t r = 0; r < rows; ++r) norm_to(op, batch_->logits_rows[r], *in, r, thread);
  } else {
    share(rows, 1, thread, [&](int64_t r, int64_t) { norm_to(op, batch_->logits_rows[r], head_, r, thread); });
    inner_barrier(thread, &w);
  }
  const int64_t whole = w.rows / kPanel;  // panels that fit into rows of the caller's array
  const auto check = [&](const float* x, int64_t n, int64_t r) {
    float max;
    int32_t finite;
    k_.argmax(x, n, &max, &finite);
    if (!finite)
      fail_later(PE_COMPUTE, "NaN or Inf in the logits at position %d", batch_->positions[batch_->logits_rows[r]]);
  };
  const auto cap = [&](float* x, int64_t n) {
    if (op.d.softcap > 0.0f) k_.softcap(x, n, op.d.softcap);
  };
  const auto panels = [&](int64_t begin, int64_t end) {
    const int64_t inside = std::min(end, whole);
    if (begin < inside) {
      float* out = logits_out_ + begin * kPanel;
      linear_range(w, *in, op.bias, begin, inside, out, logits_stride_, 0.0f, rows, thread);
      for (int64_t r = 0; r < rows; ++r) {
        cap(out + r * logits_stride_, (inside - begin) * kPanel);
        check(out + r * logits_stride_, (inside - begin) * kPanel, r);
      }
    }
    if (end > whole) {  // the last panel is wider than what is left of a row
      float* last = reinterpret_cast<float*>(thread_scratch(thread) + unpack_bytes(w.padded_cols));
      linear_range(w, *in, op.bias, whole, whole + 1, last, kPanel, 0.0f, rows, thread);
      const int64_t n = w.rows - whole * kPanel;
      for (int64_t r = 0; r < rows; ++r) {
        cap(last + r * kPanel, kPanel);
        std::memcpy(logits_out_ + r * logits_stride_ + whole * kPanel, last + r * kPanel, static_cast<size_t>(n) * 4);
        check(last + r * kPanel, n, r);
      }
    }
  };
  share(w.panels, 2, thread, panels, rows <= kGemvTokens);
}

void CpuProgram::sample(const Op&, int thread) {
  if (!batch_->sampled) return;
  float* work = reinterpret_cast<float*>(thread_scratch(thread));
  share(batch_->logits_count, 1, thread, [&](int64_t r, int64_t) {
    const int32_t id = sample_row(k_, logits_out_ + r * logits_stride_, vocab_, *batch_, r, work);
    batch_->sampled[r] = id;
    if (id < 0) fail_later(PE_REQUEST, "no token can be chosen: every logit is -inf after the logit bias");
  });
}

}  // namespace pe
