#include "cuda/kv_layout.h"

#include "runtime/kv_cache.h"

namespace pe::cuda {

KvLayout kv_layout(const pe_kv_desc& desc) {
  const CpuKvGroup checked(desc);  // holds no memory before it is reserved
  const int64_t element = kv_element_bytes(desc.dtype), scales = desc.dtype == PE_KV_INT8 ? kKvBlock * 4 : 0;
  KvLayout l;
  l.k_stride = static_cast<int32_t>(align_up(static_cast<size_t>(desc.k_dim), kPanel));
  l.v_stride = checked.v_stride();
  l.k_scales = int64_t{l.k_stride} * kKvBlock * element;
  l.v_offset = l.k_scales + scales;
  l.v_scales = l.v_offset + int64_t{l.v_stride} * kKvBlock * element;
  l.head_bytes = l.v_scales + scales;
  l.layer_bytes = l.head_bytes * desc.kv_heads;
  l.block_bytes = l.layer_bytes * desc.layers;
  return l;
}

KvView kv_view(const pe_kv_desc& desc, uint8_t* pool, int32_t layer, const int32_t* table) {
  const KvLayout l = kv_layout(desc);
  KvView v;
  v.base = pool + layer * l.layer_bytes;
  v.block_bytes = l.block_bytes;
  v.head_bytes = l.head_bytes;
  v.v_offset = l.v_offset;
  v.k_scales = l.k_scales;
  v.v_scales = l.v_scales;
  v.kv_heads = desc.kv_heads;
  v.k_dim = desc.k_dim;
  v.v_dim = desc.v_dim;
  v.k_stride = l.k_stride;
  v.v_stride = l.v_stride;
  v.dtype = desc.dtype;
  v.table = table;
  return v;
}

}  // namespace pe::cuda
