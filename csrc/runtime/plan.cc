// Planning a program: what shares the arena.
#include <algorithm>

#include "runtime/program.h"

namespace pe {

// Strides and bytes for so many tokens, with the rows that a GEMM tile may read past them.
void shape(Buffer& b, int64_t tokens) {
  const int64_t slack = tokens * b.per_token + kTileTokens;
  if (!b.quantized) {
    b.stride = static_cast<int64_t>(align_up(static_cast<size_t>(b.width), kPanel)) + kPanel;
    b.bytes = static_cast<size_t>(slack * b.stride) * 4;
  } else {
    // the extra 64 keeps rows of a power of two from sharing cache sets
    b.stride = static_cast<int64_t>(align_up(static_cast<size_t>(b.width), kActGroup)) + kActGroup;
    const int64_t groups = (b.width + kActGroup - 1) / kActGroup;
    b.bytes = static_cast<size_t>(slack) * (static_cast<size_t>(b.stride) + static_cast<size_t>(groups) * 8 * 4 +
                                            align_up(static_cast<size_t>(groups), 8));
  }
  b.bytes = align_up(b.bytes, kAlign);
}

void place(Buffer& b, uint8_t* base, int64_t tokens) {
  uint8_t* p = base + b.offset;
  if (!b.quantized) {
    b.f = reinterpret_cast<float*>(p);
    return;
  }
  const int64_t slack = tokens * b.per_token + kTileTokens;
  QuantView& v = b.quant;
  v.q_stride = b.stride;
  v.groups = (b.width + kActGroup - 1) / kActGroup;
  v.q = reinterpret_cast<int8_t*>(p);
  p += slack * b.stride;
  const int64_t n = slack * v.groups;
  v.scale = reinterpret_cast<float*>(p);
  v.scaled_sum64 = v.scale + n;
  v.scaled_sum32 = v.scaled_sum64 + n;
  v.negative_sum64 = reinterpret_cast<int32_t*>(v.scaled_sum32 + 2 * n);
  v.negative_sum32 = v.negative_sum64 + n;
  v.outlier_value = reinterpret_cast<float*>(v.negative_sum32 + 2 * n);
  v.outlier_column = reinterpret_cast<uint8_t*>(v.outlier_value + n);
  v.outlier_stride = static_cast<int64_t>(align_up(static_cast<size_t>(v.groups), 8));
}

bool Program::lives_in(const Buffer& b, size_t i) const {
  const bool still_read = i > 0 && ops_[i - 1].own_output >= 0 && ops_[i - 1].input == &b;  // by a slow thread
  const Op& op = ops_[i];
  return still_read || op.input == &b || op.output == &b || op.scratch == &b || op.routing == &b || op.rows == &b;
}

// A buffer lives from the first op that names it to the last. First fit over those intervals, biggest buffers first.
size_t Program::plan_lives() {
  struct Life {
    Buffer* buffer;
    size_t first, last;
  };
  std::vector<Life> lives;
  for (Buffer& b : buffers_) {
    Life life{&b, ops_.size(), 0};
    for (size_t i = 0; i < ops_.size(); ++i) {
      if (!lives_in(b, i)) continue;
      life.first = std::min(life.first, i);
      life.last = i;
    }
    if (life.first < ops_.size()) lives.push_back(life);
  }
  std::stable_sort(lives.begin(), lives.end(),
                   [](const Life& a, const Life& b) { return a.buffer->bytes > b.buffer->bytes; });
  size_t total = 0;
  std::vector<const Life*> placed;
  for (const Life& life : lives) {
    std::vector<const Life*> rivals;
    for (const Life* p : placed)
      if (p->first <= life.last && life.first <= p->last) rivals.push_back(p);
    std::sort(rivals.begin(), rivals.end(),
              [](const Life* a, const Life* b) { return a->buffer->offset < b->buffer->offset; });
    size_t at = 0;
    for (const Life* p : rivals) {
      if (at + life.buffer->bytes <= p->buffer->offset) break;
      at = std::max(at, p->buffer->offset + p->buffer->bytes);
    }
    life.buffer->offset = at;
    placed.push_back(&life);
    alive_.push_back(life.buffer);
    total = std::max(total, at + life.buffer->bytes);
  }
  return total;
}

void Program::place_lives(uint8_t* arena) {
  for (Buffer* b : alive_) place(*b, arena, max_tokens_);
  for (Op& op : ops_) {
    if (!op.rows) continue;
    op.gathered.offset = op.rows->offset;
    place(op.gathered, arena, max_tokens_);
  }
}

}  // namespace pe
