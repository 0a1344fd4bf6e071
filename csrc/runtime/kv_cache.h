// A group of layers whose KV has one shape: a pool of blocks of 32 tokens, each for all layers of the group. Where the
// blocks lie is the backend's.
#pragma once

#include <vector>

#include "core/memory.h"
#include "cpu/kernel_table.h"
#include "pyengine.h"

namespace pe {

class KvGroup {
 public:
  explicit KvGroup(const pe_kv_desc& desc);  // throws Error(PE_REQUEST)
  virtual ~KvGroup() = default;
  KvGroup(const KvGroup&) = delete;
  KvGroup& operator=(const KvGroup&) = delete;
  virtual void reserve(int32_t blocks) = 0;  // grows, keeps what is there
  virtual void flush() const = 0;            // out of all caches
  virtual size_t block_bytes() const = 0;
  int32_t blocks() const { return blocks_; }
  const pe_kv_desc& desc() const { return desc_; }
  int32_t v_stride() const { return v_stride_; }

 protected:
  pe_kv_desc desc_;
  int32_t v_stride_, blocks_ = 0;
};

// Blocks that were reserved together lie by layer and head, so that what attention reads of one head is one ascending
// stream.
class CpuKvGroup final : public KvGroup {
 public:
  explicit CpuKvGroup(const pe_kv_desc& desc);
  void reserve(int32_t blocks) override;  // new blocks are zero, and side by side
  void flush() const override;
  size_t block_bytes() const override { return layer_bytes_ * static_cast<size_t>(desc_.layers); }

  // K is [k_dim][32], V is [32][v_stride]. int8: K [k_dim / 4][32][4], scales [32]; V scales [32], [8][v_stride][4].
  uint8_t* k(int32_t block, int32_t layer, int32_t head) const {
    const Place& p = places_[static_cast<size_t>(block)];
    return p.first + p.stride * static_cast<size_t>(layer * desc_.kv_heads + head);
  }
  uint8_t* v(int32_t block, int32_t layer, int32_t head) const { return k(block, layer, head) + k_bytes_; }

 private:
  size_t k_bytes_, head_bytes_, layer_bytes_;
  struct Place {
    uint8_t* first;  // of layer 0, head 0
    size_t stride;   // to the next head, or the next layer's first
  };
  std::vector<Memory> pool_;   // one piece per growth: [layer][head][block]
  std::vector<Place> places_;  // of the blocks, into it
};

}  // namespace pe
