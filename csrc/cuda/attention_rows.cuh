// How rows of attention, (token, query head of a KV head), are shared among blocks.
#pragma once

#include "cuda/device.h"

namespace pe::cuda {

struct AttentionWork {
  Attention a;
  Step step;
  int32_t ratio, row_heads, row_tokens, head_chunks;  // query heads of a KV head; rows of a block; blocks of a KV head
};

// A block's rows: heads first_head + r % row_heads of tokens first_token + r / row_heads.
struct BlockRows {
  int32_t kv_head, first_head, heads, first_token, tokens;
};

__device__ __forceinline__ BlockRows heads_of(const AttentionWork& w, int kv_head, int chunk) {
  const int first = chunk * w.row_heads;
  return {kv_head, kv_head * w.ratio + first, ::min(w.row_heads, w.ratio - first), 0, 1};
}

// The tile's tokens: tiles of a sequence start at its first one. false: there are fewer tiles than blocks.
__device__ __forceinline__ bool find_tile(const AttentionWork& w, int tile, BlockRows& b, int& sequence) {
  for (sequence = 0; sequence < w.a.sequences; ++sequence) {
    const int begin = w.step.query_start[sequence], end = w.step.query_start[sequence + 1];
    const int tiles = (end - begin + w.row_tokens - 1) / w.row_tokens;
    if (tile < tiles) {
      b.first_token = begin + tile * w.row_tokens;
      b.tokens = ::min(w.row_tokens, end - b.first_token);
      return true;
    }
    tile -= tiles;
  }
  return false;
}

// The work of blocks of up to `rows` rows, of so many heads at most.
inline AttentionWork attention_work(const Attention& a, const Step& step, int rows, int most_heads, bool one_token) {
  AttentionWork w{};
  w.a = a;
  w.step = step;
  w.ratio = a.heads / a.kv.kv_heads;
  w.head_chunks = (w.ratio + most_heads - 1) / most_heads;
  w.row_heads = (w.ratio + w.head_chunks - 1) / w.head_chunks;
  w.row_tokens = one_token ? 1 : rows / w.row_heads;
  return w;
}

// Blocks that tiles of all sequences may need.
inline unsigned tile_blocks(const AttentionWork& w) {
  const int tiles = (w.a.tokens + w.row_tokens - 1) / w.row_tokens + w.a.sequences - 1;
  return static_cast<unsigned>(tiles * w.a.kv.kv_heads * w.head_chunks);
}

// attention_tiles.cu: many tokens over a bfloat16 or int8 cache, on tensor cores.
bool tiles_fit(const Attention&);
void attention_tiles(Stream, const Attention&, const Step&);

}  // namespace pe::cuda
