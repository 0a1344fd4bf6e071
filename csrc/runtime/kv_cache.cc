#include "runtime/kv_cache.h"

#include "core/status.h"

namespace pe {

KvGroup::KvGroup(const pe_kv_desc& desc) : desc_(desc) {
  if (desc.layers < 1 || desc.kv_heads < 1 || desc.k_dim < 1 || desc.v_dim < 1)
    fail(PE_REQUEST, "KV group of %d layers, %d heads, k_dim %d, v_dim %d; expected at least 1 of each", desc.layers,
         desc.kv_heads, desc.k_dim, desc.v_dim);
  if (desc.dtype != PE_SRC_F32 && desc.dtype != PE_SRC_BF16)
    fail(PE_UNSUPPORTED, "KV dtype %d; expected float32 or bfloat16", desc.dtype);
  const size_t element = desc.dtype == PE_SRC_F32 ? 4 : 2;
  v_stride_ = static_cast<int32_t>(align_up(static_cast<size_t>(desc.v_dim), kPanel));
  k_bytes_ = static_cast<size_t>(desc.k_dim) * kKvBlock * element;
  head_bytes_ = k_bytes_ + static_cast<size_t>(v_stride_) * kKvBlock * element;
  layer_bytes_ = head_bytes_ * static_cast<size_t>(desc.kv_heads);
}

void KvGroup::reserve(int32_t blocks) {
  while (this->blocks() < blocks) pool_.emplace_back(block_bytes());
}

}  // namespace pe
