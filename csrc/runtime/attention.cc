// The attention op: tiles of query rows against partitions of 256 keys.
//
// A prefill tile walks its partitions and merges as it goes. In decode there are few tiles, so every (tile, partition)
// is a task of its own and the merge follows after a barrier. Both merge the same partials in the same ascending order.
#include <algorithm>

#include "runtime/cpu_program.h"

namespace pe {

namespace {
constexpr int64_t kSplitTokens = 8;    // batches up to here split over partitions
constexpr int64_t kRunsPerThread = 6;  // so that a slow thread does not hold up the others
constexpr int64_t kMaxRun = 8;         // partitions
}  // namespace

void CpuProgram::tile_batch() {
  const pe_batch& b = *batch_;
  int64_t partial_rows = 0;
  bool long_context = false;
  for (Tiling& tiling : tilings_) {
    tiling.tiles.clear();
    tiling.partial_rows = tiling.partition_tasks = 0;
    for (int32_t s = 0; s < b.sequences; ++s) {
      for (int32_t t = b.query_start[s]; t < b.query_start[s + 1]; t += tiling.tile_tokens) {
        const int32_t end = std::min(t + tiling.tile_tokens, b.query_start[s + 1]);
        const int32_t partitions = b.positions[end - 1] / kPartition + 1;
        tiling.tiles.push_back({s, t, end, partitions, tiling.partial_rows});
        tiling.partial_rows += int64_t{partitions} * (end - t) * tiling.group_heads;
        tiling.partition_tasks += partitions;
        long_context |= partitions > 1;
      }
    }
    partial_rows = std::max(partial_rows, tiling.partial_rows);
  }
  split_ = long_context && b.tokens <= kSplitTokens;
  if (!split_) return;
  const size_t wanted = static_cast<size_t>(partial_rows * split_groups_ * (max_v_stride_ + 2)) * 4;
  if (partials_.size() < wanted) {
    partials_ = Memory(2 * wanted);
    ++allocations_;
  }
}

// What all partitions of a tile's rows of one group of heads share, in this thread's scratch.
AttentionArgs CpuProgram::tile_rows(const Op& op, const TokenTile& tile, int64_t group, int thread) {
  const int32_t heads = op.group_heads, rows = (tile.end - tile.begin) * heads;
  uint8_t* scratch = thread_scratch(thread);
  int64_t* q_offsets = reinterpret_cast<int64_t*>(scratch + rows_offset_);
  int32_t* begin = reinterpret_cast<int32_t*>(q_offsets + max_rows_);
  int32_t* end = begin + max_rows_;
  for (int32_t r = 0; r < rows; ++r) {
    const int64_t t = tile.begin + r / heads;
    const int32_t p = batch_->positions[t];
    q_offsets[r] = t * op.input->stride + (group * heads + r % heads) * op.d.head_dim;
    begin[r] = op.d.window > 0 ? std::max(0, p + 1 - op.d.window) : 0;
    end[r] = p + 1;
  }
  AttentionArgs a{};
  a.q = op.input->f;
  a.q_offsets = q_offsets;
  a.key_begin = begin;
  a.key_end = end;
  a.rows = rows;
  a.k_dim = op.d.head_dim;
  a.v_dim = op.kv->desc().v_dim;
  a.v_stride = op.kv->v_stride();
  a.dtype = op.kv->desc().dtype;
  a.scale = op.d.scale;
  a.softcap = op.d.softcap;
  a.scores = reinterpret_cast<float*>(scratch + scores_offset_);
  a.q_digits = reinterpret_cast<int8_t*>(scratch + digits_offset_);
  a.q_digit_stride = static_cast<int64_t>(q_digit_bytes(op.d.head_dim));
  k_.attention_q(&a);
  return a;
}

// more: the same thread takes the partition behind this one next
void CpuProgram::attend_partition(const Op& op, const TokenTile& tile, int64_t group, int32_t partition, bool more,
                                  AttentionArgs& a, float* max, float* sum, float* acc) {
  constexpr int kBlocks = kPartition / kKvBlock;
  const uint8_t *k_blocks[kBlocks], *v_blocks[kBlocks], *next_k_blocks[kBlocks];
  const auto kv_head = static_cast<int32_t>(group * op.group_heads / (op.d.heads / op.d.kv_heads));
  for (int i = 0; i < kBlocks; ++i) {
    const int64_t index = int64_t{partition} * kBlocks + i;
    if (index * kKvBlock >= a.key_end[a.rows - 1]) {
      k_blocks[i] = v_blocks[i] = nullptr;
      continue;
    }
    const int32_t block = block_of(op, tile.sequence, index);
    k_blocks[i] = cpu_kv(op).k(block, op.d.kv_layer, kv_head);
    v_blocks[i] = cpu_kv(op).v(block, op.d.kv_layer, kv_head);
  }
  for (int i = 0; more && i < kBlocks; ++i) {
    const int64_t index =
        std::min<int64_t>(int64_t{partition + 1} * kBlocks + i, (a.key_end[a.rows - 1] - 1) / kKvBlock);
    next_k_blocks[i] = cpu_kv(op).k(block_of(op, tile.sequence, index), op.d.kv_layer, kv_head);
  }
  a.partition = partition;
  a.k_blocks = k_blocks;
  a.v_blocks = v_blocks;
  a.next_k_blocks = more ? next_k_blocks : nullptr;
  a.max_out = max;
  a.sum_out = sum;
  a.acc_out = acc;
  k_.attention(&a);
}

namespace {
constexpr float kMinusInf = -__builtin_inff();

// Whether heads of one task fill whole groups of int8, which can be rounded as soon as they are there.
bool heads_fill_groups(const Op& op) { return int64_t{op.group_heads} * op.kv->desc().v_dim % kActGroup == 0; }
}  // namespace

void CpuProgram::quantize_heads(const Op& op, const TokenTile& tile, int64_t group) {
  if (op.d.kind == PE_OP_ATTENTION || !heads_fill_groups(op)) return;
  const int64_t columns = int64_t{op.group_heads} * op.kv->desc().v_dim, begin = group * columns;
  quantize_rows(op.scratch->row(tile.begin) + begin, op.scratch->stride, begin, begin + columns, *op.output, tile.begin,
                tile.end - tile.begin);
}

void CpuProgram::attend_tile(const Op& op, const TokenTile& tile, int64_t group, int thread) {
  const Buffer& out = op.d.kind == PE_OP_ATTENTION ? *op.output : *op.scratch;
  const int32_t heads = op.group_heads, rows = (tile.end - tile.begin) * heads;
  const int64_t width = op.kv->v_stride(), v_dim = op.kv->desc().v_dim;
  uint8_t* scratch = thread_scratch(thread);
  float* acc = reinterpret_cast<float*>(scratch + acc_offset_);
  float* part = acc + max_rows_ * max_v_stride_;
  float* max = reinterpret_cast<float*>(scratch + rows_offset_ + static_cast<size_t>(max_rows_) * 16);
  float *sum = max + max_rows_, *part_max = sum + max_rows_, *part_sum = part_max + max_rows_;
  std::fill(max, max + rows, kMinusInf);
  std::fill(sum, sum + rows, 0.0f);
  std::fill(acc, acc + rows * width, 0.0f);
  const int32_t first_position = batch_->positions[tile.begin];
  const int32_t first_key = op.d.window > 0 ? std::max(0, first_position + 1 - op.d.window) : 0;
  AttentionArgs args = tile_rows(op, tile, group, thread);
  for (int32_t p = first_key / kPartition; p < tile.partitions; ++p) {
    attend_partition(op, tile, group, p, p + 1 < tile.partitions, args, part_max, part_sum, part);
    for (int32_t r = 0; r < rows; ++r)
      k_.merge(max + r, sum + r, acc + r * width, part_max[r], part_sum[r], part + r * width, width);
  }
  for (int32_t r = 0; r < rows; ++r)
    k_.divide(acc + r * width, sum[r], out.row(tile.begin + r / heads) + (group * heads + r % heads) * v_dim, v_dim);
  quantize_heads(op, tile, group);
}

void CpuProgram::merge_partials(const Op& op, const TokenTile& tile, int64_t group, int thread) {
  const Buffer& out = op.d.kind == PE_OP_ATTENTION ? *op.output : *op.scratch;
  const int32_t heads = op.group_heads, rows = (tile.end - tile.begin) * heads;
  const int64_t width = op.kv->v_stride(), v_dim = op.kv->desc().v_dim, groups = op.d.heads / heads;
  float* acc = reinterpret_cast<float*>(thread_scratch(thread) + acc_offset_);
  const float* partials = reinterpret_cast<const float*>(partials_.data());
  for (int32_t r = 0; r < rows; ++r) {
    float max = kMinusInf, sum = 0.0f;
    std::fill(acc, acc + width, 0.0f);
    for (int32_t p = 0; p < tile.partitions; ++p) {
      const int64_t first = (tile.first_partial + int64_t{p} * rows) * groups + group * rows;
      const float* base = partials + first * (width + 2);
      k_.merge(&max, &sum, acc, base[rows * width + r], base[rows * (width + 1) + r], base + r * width, width);
    }
    k_.divide(acc, sum, out.row(tile.begin + r / heads) + (group * heads + r % heads) * v_dim, v_dim);
  }
  quantize_heads(op, tile, group);
}

void CpuProgram::attention(const Op& op, int thread) {
  const Tiling& tiling = tilings_[op.tiling];
  const int64_t groups = op.d.heads / op.group_heads, tiles = static_cast<int64_t>(tiling.tiles.size());
  const auto tasks = [&](int64_t count, auto&& body) {
    for (int64_t i; (i = counter_.fetch_add(1, std::memory_order_relaxed)) < count;) {
      if (cancelled()) return;
      body(i);
    }
  };
  if (!split_) {
    // last tiles first: they have the most keys
    tasks(tiles * groups, [&](int64_t i) {
      attend_tile(op, tiling.tiles[static_cast<size_t>(tiles - 1 - i / groups)], i % groups, thread);
    });
  } else {
    const int64_t width = op.kv->v_stride(), count = tiling.partition_tasks * groups;
    // runs of partitions of one group: its rows are prepared once, its blocks read in order
    const int64_t chunk = std::clamp<int64_t>(count / (backend_.team.size() * kRunsPerThread), 1, kMaxRun);
    tasks((count + chunk - 1) / chunk, [&](int64_t run) {
      const TokenTile* ready = nullptr;  // tile and group that `args` is of
      int64_t ready_group = -1;
      AttentionArgs args{};
      const int64_t end = std::min((run + 1) * chunk, count);
      for (int64_t i = run * chunk; i < end; ++i) {
        int64_t index = i;
        size_t t = 0;
        while (index >= tiling.tiles[t].partitions * groups) index -= tiling.tiles[t++].partitions * groups;
        const TokenTile& tile = tiling.tiles[t];
        const int64_t group = index / tile.partitions, partition = index % tile.partitions;
        if (ready != &tile || ready_group != group) args = tile_rows(op, tile, group, thread);
        ready = &tile;
        ready_group = group;
        const int64_t rows = int64_t{tile.end - tile.begin} * tiling.group_heads;
        const int64_t first = (tile.first_partial + partition * rows) * groups + group * rows;
        float* base = reinterpret_cast<float*>(partials_.data()) + first * (width + 2);
        attend_partition(op, tile, group, static_cast<int32_t>(partition),
                         i + 1 < end && partition + 1 < tile.partitions, args, base + rows * width,
                         base + rows * (width + 1), base);
      }
    });
    inner_barrier(thread, op.next_weight);
    tasks(tiles * groups,
          [&](int64_t i) { merge_partials(op, tiling.tiles[static_cast<size_t>(i / groups)], i % groups, thread); });
  }
  if (op.d.kind == PE_OP_ATTENTION || heads_fill_groups(op)) return;
  inner_barrier(thread, op.next_weight);
  const int64_t parts = (op.output->width + kActGroup - 1) / kActGroup;
  const int64_t chunk = batch_->tokens > kSplitTokens ? parts : std::max<int64_t>(1, parts / backend_.team.size());
  for (int64_t i; (i = counter_.fetch_add(chunk, std::memory_order_relaxed)) < batch_->tokens * parts;) {
    const int64_t end = std::min(i + chunk, batch_->tokens * parts);
    for (int64_t j = i, next; j < end; j = next) {  // a part of a row
      const int64_t t = j / parts, column = j % parts * kActGroup;
      next = std::min(end, (t + 1) * parts);
      quantize_rows(op.scratch->row(t) + column, 0, column, column + (next - j) * kActGroup, *op.output, t, 1);
    }
  }
}

}  // namespace pe
