// A group of layers whose KV has one shape: a pool of blocks of 32 tokens, each for all layers of the group. Blocks
// that were reserved together lie by layer and head, so that what attention reads of one head is one ascending stream.
#pragma once

#include <vector>

#include "core/memory.h"
#include "cpu/kernel_table.h"
#include "pyengine.h"

namespace pe {

class KvGroup {
 public:
  explicit KvGroup(const pe_kv_desc& desc);  // throws Error(PE_REQUEST)
  void reserve(int32_t blocks);              // grows; new blocks are zero, and side by side
  void flush() const;                        // out of all caches
  int32_t blocks() const { return static_cast<int32_t>(blocks_.size()); }
  size_t block_bytes() const { return layer_bytes_ * static_cast<size_t>(desc_.layers); }
  const pe_kv_desc& desc() const { return desc_; }
  int32_t v_stride() const { return v_stride_; }

  // K is [k_dim][32], V is [32][v_stride]. int8: K [k_dim / 4][32][4], scales [32]; V scales [32], [8][v_stride][4].
  uint8_t* k(int32_t block, int32_t layer, int32_t head) const {
    const Place& p = blocks_[static_cast<size_t>(block)];
    return p.first + p.stride * static_cast<size_t>(layer * desc_.kv_heads + head);
  }
  uint8_t* v(int32_t block, int32_t layer, int32_t head) const { return k(block, layer, head) + k_bytes_; }

 private:
  pe_kv_desc desc_;
  int32_t v_stride_;
  size_t k_bytes_, head_bytes_, layer_bytes_;
  struct Place {
    uint8_t* first;  // of layer 0, head 0
    size_t stride;   // to the next head, or the next layer's first
  };
  std::vector<Memory> pool_;   // one piece per growth: [layer][head][block]
  std::vector<Place> blocks_;  // into it
};

}  // namespace pe
