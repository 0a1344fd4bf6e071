#include "runtime/kv_cache.h"

#include "core/status.h"

namespace pe {

KvGroup::KvGroup(const pe_kv_desc& desc) : desc_(desc) {
  if (desc.layers < 1 || desc.kv_heads < 1 || desc.k_dim < 1 || desc.v_dim < 1)
    fail(PE_REQUEST, "KV group of %d layers, %d heads, k_dim %d, v_dim %d; expected at least 1 of each", desc.layers,
         desc.kv_heads, desc.k_dim, desc.v_dim);
  if (desc.dtype < PE_KV_F32 || desc.dtype > PE_KV_INT8)
    fail(PE_UNSUPPORTED, "KV dtype %d; expected float32, bfloat16 or int8", desc.dtype);
  v_stride_ = static_cast<int32_t>(align_up(static_cast<size_t>(desc.v_dim), kPanel));
}

CpuKvGroup::CpuKvGroup(const pe_kv_desc& desc) : KvGroup(desc) {
  const bool int8 = desc.dtype == PE_KV_INT8;
  const size_t element = int8 ? 1 : desc.dtype == PE_KV_BF16 ? 2 : 4, scales = int8 ? kKvBlock * 4 : 0;
  k_bytes_ = align_up(static_cast<size_t>(desc.k_dim), int8 ? 4 : 1) * kKvBlock * element + scales;
  head_bytes_ = k_bytes_ + static_cast<size_t>(v_stride_) * kKvBlock * element + scales;
  layer_bytes_ = head_bytes_ * static_cast<size_t>(desc.kv_heads);
}

void CpuKvGroup::reserve(int32_t blocks) {
  if (blocks <= blocks_) return;
  const size_t more = static_cast<size_t>(blocks - blocks_);
  Memory piece(more * block_bytes());
  places_.reserve(places_.size() + more);
  pool_.push_back(std::move(piece));
  for (size_t i = 0; i < more; ++i) places_.push_back({pool_.back().data() + i * head_bytes_, more * head_bytes_});
  blocks_ = blocks;
}

void CpuKvGroup::flush() const {
  for (const Memory& piece : pool_) flush_caches(piece.data(), piece.size());
}

}  // namespace pe
