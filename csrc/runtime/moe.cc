// The ops of a mixture of experts. A router's rows, (token, slot), are sorted by expert, so that each expert's are a
// batch of their own: one GEMV where they are few, the GEMM above. What is added up per token is added in the order of
// slots, and every product is what it is alone: no result depends on what else is in the batch.
#include <cstring>

#include "runtime/share.h"

namespace pe {

namespace {

constexpr int64_t kRouterTokens = 64;  // of a task of the router's matrix
constexpr int64_t kDownPanels = 8;     // of a task of down

// The buffer from a row on.
Buffer rows_from(const Buffer& b, int64_t row) {
  Buffer from = b;
  if (!b.quantized) {
    from.f += row * b.stride;
    return from;
  }
  QuantView& v = from.quant;
  v.q += row * v.q_stride;
  v.scale += row * v.groups;
  v.scaled_sum64 += row * v.groups;
  v.scaled_sum32 += 2 * row * v.groups;
  v.negative_sum64 += row * v.groups;
  v.negative_sum32 += 2 * row * v.groups;
  v.outlier_value += row * v.groups;
  v.outlier_column += row * v.outlier_stride;
  return from;
}

void copy_row(const Buffer& from, const Buffer& to) {  // the first of each
  if (!from.quantized) {
    std::memcpy(to.f, from.f, static_cast<size_t>(from.width) * 4);
    return;
  }
  const QuantView &a = from.quant, &b = to.quant;
  const size_t groups = static_cast<size_t>(a.groups) * 4;
  std::memcpy(b.q, a.q, static_cast<size_t>(a.groups) * kActGroup);
  std::memcpy(b.scale, a.scale, groups);
  std::memcpy(b.scaled_sum64, a.scaled_sum64, groups);
  std::memcpy(b.scaled_sum32, a.scaled_sum32, 2 * groups);
  std::memcpy(b.negative_sum64, a.negative_sum64, groups);
  std::memcpy(b.negative_sum32, a.negative_sum32, 2 * groups);
  std::memcpy(b.outlier_value, a.outlier_value, groups);
  std::memcpy(b.outlier_column, a.outlier_column, static_cast<size_t>(a.outlier_stride));
}

int64_t panels_of(int64_t width) { return (width + kPanel - 1) / kPanel; }

}  // namespace

// ---- the router -----------------------------------------------------------------------------------------------------

// Logits, then the choice: in decode by the last thread at the closing barrier, else token by token.
void CpuProgram::router(const Op& op, int thread) {
  const int64_t tokens = batch_->tokens, blocks = (tokens + kRouterTokens - 1) / kRouterTokens;
  share(op.weight->panels * blocks, 1, thread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i / op.weight->panels * kRouterTokens, panel = i % op.weight->panels;
      linear_range(*op.weight, rows_from(*op.input, first), nullptr, panel, panel + 1,
                   op.scratch->row(first) + panel * kPanel, op.scratch->stride, 0.0f,
                   std::min(kRouterTokens, tokens - first), thread);
    }
  });
  if (few_tokens()) return;
  inner_barrier(thread);
  share(tokens, 4, thread, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) route_token(op, t, thread);
  });
}

void CpuProgram::route_token(const Op& op, int64_t t, int thread) {
  RouteArgs a{};
  a.logits = op.scratch->row(t);
  a.choice = reinterpret_cast<float*>(thread_scratch(thread));
  a.bias = op.bias;
  a.experts = op.d.experts;
  a.top_k = op.d.top_k;
  a.groups = op.d.groups;
  a.top_groups = op.d.top_groups;
  a.scoring = op.d.scoring;
  a.group_score = op.d.group_score;
  a.normalise = op.d.normalise;
  a.scale = op.d.scale;
  a.eps = op.d.eps;
  a.out = op.output->row(t);
  if (!k_.route(&a))
    fail_later(PE_COMPUTE, "NaN or Inf in the router of layer %d at position %d", op.d.layer, batch_->positions[t]);
}

// All threads have arrived: sorts the rows by expert, inside an expert by token, and counts them.
void CpuProgram::finish_routing(const Op& op) {
  const int64_t tokens = batch_->tokens, k = op.d.top_k;
  if (few_tokens())
    for (int64_t t = 0; t < tokens; ++t) route_token(op, t, 0);
  const auto experts = static_cast<size_t>(op.d.experts);
  int32_t* first = first_row_.data();
  std::fill(first, first + experts + 1, 0);
  const auto expert_of = [&](int64_t row) { return static_cast<size_t>(op.output->row(row / k)[k + row % k]); };
  for (int64_t row = 0; row < tokens * k; ++row) ++first[expert_of(row)];
  active_.clear();
  int32_t total = 0;
  for (size_t e = 0; e < experts; ++e) {
    const int32_t count = first[e];
    if (count) active_.push_back(static_cast<int32_t>(e));
    expert_tokens_[op.first_expert + e] += static_cast<uint64_t>(count);
    first[e] = total;
    total += count;
  }
  for (int64_t row = 0; row < tokens * k; ++row) {
    int32_t& next = first[expert_of(row)];
    order_[static_cast<size_t>(next)] = static_cast<int32_t>(row);
    place_[static_cast<size_t>(row)] = next++;
  }
  for (size_t e = experts; e > 0; --e) first[e] = first[e - 1];  // each had become its end
  first[0] = 0;
}

// ---- the experts ----------------------------------------------------------------------------------------------------

// 64 columns of one expert's gate and up at a time, as in ffn: float sums in this thread's cache, then the
// activation, as int8 where that is what down reads.
void CpuProgram::moe_gate_up(const Op& op, const Buffer& act, int thread) {
  const int64_t tokens = batch_->tokens, panels = panels_of(act.width);
  const int64_t units = (act.width + kActGroup - 1) / kActGroup;
  constexpr int64_t kColumns = 2 * kActGroup;
  if (tokens > 1) {
    share(tokens * op.d.top_k, 4, thread, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        copy_row(rows_from(*op.input, order_[static_cast<size_t>(r)] / op.d.top_k), rows_from(op.gathered, r));
    });
    inner_barrier(thread);
  }
  float* sums = reinterpret_cast<float*>(thread_scratch(thread) + unpack_bytes(op.weight->padded_cols));
  const auto body = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t expert = active_[static_cast<size_t>(i / units)], unit = i % units;
      const int64_t row = first_row_[static_cast<size_t>(expert)];
      const int64_t rows = first_row_[static_cast<size_t>(expert) + 1] - row;
      const int64_t first = unit * kColumns / kPanel, last = std::min(first + kColumns / kPanel, 2 * panels);
      const int64_t base = expert * 2 * panels;
      linear_range(*op.weight, tokens > 1 ? rows_from(op.gathered, row) : *op.input, nullptr, base + first, base + last,
                   sums, kColumns, 0.0f, rows, thread);
      const int64_t column = unit * kActGroup, wide = (last - first) / 2 * kPanel;
      activate(k_.act_mul, sums, kColumns, wide, op.d.activation, act, column, row, rows);
    }
  };
  share(static_cast<int64_t>(active_.size()) * units, 1, thread, body, tokens <= kGemvTokens);
}

// One token: a thread has all its experts' products of the columns that it takes, and needs nobody's.
void CpuProgram::moe_down_one(const Op& op, const Buffer& act, float factor, int thread) {
  const int64_t panels = panels_of(op.output->width), k = op.d.top_k;
  float* product = reinterpret_cast<float*>(thread_scratch(thread) + unpack_bytes(op.weight2->padded_cols));
  float* sum = product + panels * kPanel;
  const float* routing = op.routing->row(0);
  const auto body = [&](int64_t begin, int64_t end) {
    const int64_t columns = (end - begin) * kPanel;
    float* out = op.output->row(0) + begin * kPanel;
    std::fill(sum, sum + columns, 0.0f);
    for (int64_t s = 0; s < k; ++s) {
      const int64_t base = static_cast<int64_t>(routing[k + s]) * panels;
      linear_range(*op.weight2, rows_from(act, place_[static_cast<size_t>(s)]), nullptr, base + begin, base + end,
                   product, columns, 0.0f, 1, thread);
      k_.add(product, sum, columns, routing[s]);
    }
    if (factor != 0.0f)
      k_.add(sum, out, columns, factor);
    else
      std::memcpy(out, sum, static_cast<size_t>(columns) * 4);
  };
  share(panels, kDownPanels, thread, body, true);
}

void CpuProgram::moe_down(const Op& op, const Buffer& act, float factor, int thread) {
  const int64_t tokens = batch_->tokens, k = op.d.top_k;
  if (tokens == 1) return moe_down_one(op, act, factor, thread);
  const int64_t panels = panels_of(op.output->width), tasks = (panels + kDownPanels - 1) / kDownPanels;
  const auto body = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t expert = active_[static_cast<size_t>(i / tasks)], first = i % tasks * kDownPanels;
      const int64_t row = first_row_[static_cast<size_t>(expert)];
      const int64_t rows = first_row_[static_cast<size_t>(expert) + 1] - row, base = expert * panels;
      linear_range(*op.weight2, rows_from(act, row), nullptr, base + first,
                   base + std::min(first + kDownPanels, panels), op.rows->row(row) + first * kPanel, op.rows->stride,
                   0.0f, rows, thread);
    }
  };
  share(static_cast<int64_t>(active_.size()) * tasks, 1, thread, body, tokens <= kGemvTokens);
  inner_barrier(thread);
  const int64_t width = op.output->width;
  float* sum = reinterpret_cast<float*>(thread_scratch(thread));
  share(tokens, 1, thread, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      std::fill(sum, sum + width, 0.0f);
      for (int64_t s = 0; s < k; ++s)
        k_.add(op.rows->row(place_[static_cast<size_t>(t * k + s)]), sum, width, op.routing->row(t)[s]);
      if (factor != 0.0f)
        k_.add(sum, op.output->row(t), width, factor);
      else
        std::memcpy(op.output->row(t), sum, static_cast<size_t>(width) * 4);
    }
  });
}

void CpuProgram::moe_ffn(const Op& op, int thread) {
  moe_gate_up(op, *op.scratch, thread);
  const int64_t panels = panels_of(op.output->width);  // the first slot's are the first that are read
  const auto expert = static_cast<int64_t>(op.routing->row(0)[op.d.top_k]);
  wait_for_all(thread, op.weight2, [] {}, expert * panels, panels);
  moe_down(op, *op.scratch, op.d.scale, thread);
}

}  // namespace pe
