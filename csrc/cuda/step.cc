// The arrays of a step: one block of memory, written on the host, copied in one piece.
#include <algorithm>
#include <bit>

#include "core/status.h"
#include "cuda/kv_layout.h"
#include "cuda/program.h"

namespace pe::cuda {

namespace {

int32_t power_of_two(int32_t n) { return static_cast<int32_t>(std::bit_ceil(static_cast<uint32_t>(n))); }

template <class T>
T* at(uint8_t* base, size_t offset) {
  return reinterpret_cast<T*>(base + offset);
}

int32_t last_position(const pe_batch& b) {
  int32_t last = 0;
  for (int32_t s = 0; s < b.sequences; ++s) last = std::max(last, b.positions[b.query_start[s + 1] - 1]);
  return last;
}

}  // namespace

StepLayout::StepLayout(const Shape& shape, size_t groups, int32_t table_width) {
  const auto take = [this](size_t count, size_t bytes) {
    const size_t here = end;
    end = align_up(end + count * bytes, 16);
    return here;
  };
  const auto tokens = static_cast<size_t>(shape.tokens), rows = static_cast<size_t>(shape.rows),
             count = static_cast<size_t>(shape.sequences);
  failure = take(1, sizeof(Failure));
  sampled = take(rows, sizeof(SampleOut));
  results_end = end;
  token_ids = take(tokens, 4);
  positions = take(tokens, 4);
  sequences = take(tokens, 4);
  query_start = take(count + 1, 4);
  logits_rows = take(rows, 4);
  params = take(rows, sizeof(SampleRow));
  tables = take(groups * count * static_cast<size_t>(table_width), 4);
}

Shape CudaProgram::shape_of(const pe_batch& b) const {
  return {b.tokens, b.sequences, std::min(b.logits_count, logits_capacity_),
          power_of_two(last_position(b) / kPartition + 1)};
}

// Block tables, partial results of attention and the arrays grow with the context: by doubling, so that decode
// captures its graphs again only then.
void CudaProgram::make_room(const Shape& shape) {
  const auto void_graphs = [this] {
    replays_.clear();
    ++allocations_;
  };
  const int32_t blocks = last_position(*batch_) / kKvBlock + 1;
  if (!groups_.empty() && blocks > table_width_) {
    table_width_ = power_of_two(blocks);
    void_graphs();
  }
  const StepLayout layout(shape, groups_.size(), table_width_);
  if (layout.end > step_.size()) {
    const size_t bytes = std::bit_ceil(layout.end);
    step_ = DeviceMemory(bytes);
    staging_ = PinnedMemory(bytes);
    void_graphs();
  }
  size_t floats = 0;
  for (const Op& op : ops_)
    if (op.d.kind == PE_OP_ATTENTION || op.d.kind == PE_OP_ATTENTION_QUANTIZE) {
      const Attention a = attention_of(op, kv_view(op.kv->desc(), nullptr, 0, nullptr), shape.tokens, shape.sequences,
                                       shape.partitions);
      floats = std::max(floats, attention_scratch_floats(a));
    }
  if (floats * sizeof(float) <= partials_.size()) return;
  const size_t bytes = std::bit_ceil(floats * sizeof(float));
  check_room(bytes, "partial results of attention " + text_of_bytes(bytes));
  partials_ = DeviceMemory(bytes);
  void_graphs();
}

// first_row: of the logits rows, where not all fit at once.
void CudaProgram::fill(const Shape& shape, int32_t first_row) {
  const pe_batch& b = *batch_;
  const StepLayout layout(shape, groups_.size(), table_width_);
  uint8_t* base = staging_.data();
  *at<Failure>(base, layout.failure) = Failure{};
  std::copy_n(b.positions, b.tokens, at<int32_t>(base, layout.positions));
  std::copy_n(b.query_start, b.sequences + 1, at<int32_t>(base, layout.query_start));
  int32_t* tokens = at<int32_t>(base, layout.token_ids);
  if (b.token_ids)
    std::copy_n(b.token_ids, b.tokens, tokens);
  else
    std::fill_n(tokens, b.tokens, 0);
  int32_t* sequences = at<int32_t>(base, layout.sequences);
  for (int32_t s = 0; s < b.sequences; ++s)
    std::fill(sequences + b.query_start[s], sequences + b.query_start[s + 1], s);
  if (shape.rows) std::copy_n(b.logits_rows + first_row, shape.rows, at<int32_t>(base, layout.logits_rows));
  fill_params(shape, first_row, at<SampleRow>(base, layout.params));
  int32_t* table = at<int32_t>(base, layout.tables);
  for (const int32_t group : groups_)
    for (int32_t s = 0; s < b.sequences; ++s, table += table_width_) {
      const int32_t* from = b.block_tables[group] + int64_t{s} * b.block_table_width;
      const int32_t used = b.positions[b.query_start[s + 1] - 1] / kKvBlock + 1;
      std::copy_n(from, used, table);
      std::fill(table + used, table + table_width_, 0);
    }
}

void CudaProgram::send(const Shape& shape) {
  const StepLayout layout(shape, groups_.size(), table_width_);
  check_cuda(cudaMemcpyAsync(step_.data(), staging_.data(), layout.end, cudaMemcpyHostToDevice, cuda_.stream()),
             "copying a step");
}

void CudaProgram::send_hidden() {
  int64_t width = 0;
  for (const Op& op : ops_)
    if (op.d.kind == PE_OP_LOAD_HIDDEN) width = std::max(width, op.output->width);
  if (!width) return;
  const size_t bytes = static_cast<size_t>(batch_->tokens * width) * sizeof(float);
  check_cuda(cudaMemcpyAsync(hidden_, batch_->hidden, bytes, cudaMemcpyHostToDevice, cuda_.stream()),
             "copying the hidden state");
}

Step CudaProgram::step_of(const Shape& shape) const {
  const StepLayout layout(shape, groups_.size(), table_width_);
  uint8_t* base = step_.data();
  Step s;
  s.token_ids = at<int32_t>(base, layout.token_ids);
  s.positions = at<int32_t>(base, layout.positions);
  s.sequences = at<int32_t>(base, layout.sequences);
  s.query_start = at<int32_t>(base, layout.query_start);
  s.logits_rows = at<int32_t>(base, layout.logits_rows);
  s.failure = at<Failure>(base, layout.failure);
  s.table_width = table_width_;
  return s;
}

KvView CudaProgram::kv_view_of(const Op& op, const Shape& shape) const {
  const StepLayout layout(shape, groups_.size(), table_width_);
  const auto group = static_cast<size_t>(std::find(groups_.begin(), groups_.end(), op.d.kv_group) - groups_.begin());
  const int32_t* table = at<int32_t>(step_.data(), layout.tables) +
                         group * static_cast<size_t>(shape.sequences) * static_cast<size_t>(table_width_);
  return kv_view(op.kv->desc(), static_cast<const DeviceKvGroup*>(op.kv)->pool(), op.d.kv_layer, table);
}

}  // namespace pe::cuda
