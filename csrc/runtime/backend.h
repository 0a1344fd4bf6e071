// What a backend owns: threads, kernels, tensors, rope tables, KV groups.
#pragma once

#include <memory>
#include <vector>

#include "core/formats.h"
#include "core/thread_pool.h"
#include "cpu/dispatch.h"
#include "runtime/kv_cache.h"

namespace pe {

struct RopeTable {
  int64_t positions = 0;
  int32_t rotary_dim = 0;
  std::vector<float> values;  // [positions][rotary_dim]: cos, then sin
  const float* cos(int64_t position) const { return values.data() + position * rotary_dim; }
  std::vector<float> q_scales;  // [positions] or empty
  const float* sin(int64_t position) const { return cos(position) + rotary_dim / 2; }
  float q_scale(int64_t position) const { return q_scales.empty() ? 1.0f : q_scales[static_cast<size_t>(position)]; }
};

}  // namespace pe

struct pe_backend {
  pe_backend(int threads, const char* isa);

  const pe::Tensor& tensor(int32_t id) const;  // throw Error(PE_REQUEST)
  const pe::RopeTable& rope(int32_t id) const;
  pe::KvGroup& kv(int32_t id) const;

  void pack(int32_t id, const pe_pack_args& args);
  void dequantize(int32_t id, float* out);
  uint64_t write_tensors(const pe_tensor_file& file);  // bytes written
  std::vector<std::shared_ptr<pe::Tensor>> map_tensors(const pe_tensor_file& file);
  void measure(const pe_limit_args& args);  // limits.cc
  void flush();

  const pe::KernelTable& kernels;
  pe::Team team;
  std::vector<std::shared_ptr<pe::Tensor>> tensors;  // freed ids are null and used again; programs share them
  std::vector<std::unique_ptr<pe::RopeTable>> ropes;
  std::vector<std::unique_ptr<pe::KvGroup>> kv_groups;
};
