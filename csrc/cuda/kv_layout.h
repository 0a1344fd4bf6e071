// Where the device keeps keys and values: a pool of blocks of 32 tokens, [block][layer][head], so that a grown pool
// begins with the old one. A head of a block is K [32][k_stride], its scales, V [32][v_stride], its scales (scales:
// int8 alone). Rows are padded to 16 values, which append writes as zeros, so that kernels move 16 bytes at a time and
// need no tails.
#pragma once

#include "cuda/kernels.h"
#include "pyengine.h"

namespace pe::cuda {

struct KvLayout {
  int64_t block_bytes = 0, layer_bytes = 0, head_bytes = 0;  // a block's, and from layer to layer, head to head in it
  int64_t v_offset = 0, k_scales = 0, v_scales = 0;          // from the head's start
  int32_t k_stride = 0, v_stride = 0;                        // values
};

constexpr int64_t kv_element_bytes(int32_t dtype) { return dtype == PE_KV_INT8 ? 1 : dtype == PE_KV_BF16 ? 2 : 4; }

// Throws Error(PE_REQUEST) or Error(PE_UNSUPPORTED) as KvGroup does.
KvLayout kv_layout(const pe_kv_desc& desc);

// One layer of a pool; table: [S][Step::table_width] block ids.
KvView kv_view(const pe_kv_desc& desc, uint8_t* pool, int32_t layer, const int32_t* table);

}  // namespace pe::cuda
