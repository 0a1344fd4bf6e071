// What a backend owns: threads, kernels of the CPU, tensors, rope tables, KV groups. What it computes with is a kind of
// its own: cpu_backend.h, cuda/backend.h. Tensors are packed on the CPU for both.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/formats.h"
#include "core/thread_pool.h"
#include "cpu/dispatch.h"
#include "runtime/kv_cache.h"

namespace pe {

class Program;

struct RopeTable {
  int64_t positions = 0;
  int32_t rotary_dim = 0;
  std::vector<float> values;  // [positions][rotary_dim]: cos, then sin
  const float* cos(int64_t position) const { return values.data() + position * rotary_dim; }
  std::vector<float> q_scales;  // [positions] or empty
  const float* sin(int64_t position) const { return cos(position) + rotary_dim / 2; }
  float q_scale(int64_t position) const { return q_scales.empty() ? 1.0f : q_scales[static_cast<size_t>(position)]; }
};

// What the library was built with: cpu_library.cc, or cuda/library.cc.
std::unique_ptr<pe_backend> create_backend(const pe_backend_config& config);  // throws Error
int32_t device_count(std::string& why_none);
const char* device_name(int32_t device);  // nullptr past the end
void device_bytes(int32_t device, uint64_t* free, uint64_t* total);

}  // namespace pe

struct pe_backend {
  pe_backend(int threads, const char* isa);
  virtual ~pe_backend() = default;
  pe_backend(const pe_backend&) = delete;
  pe_backend& operator=(const pe_backend&) = delete;

  virtual const char* device() const = 0;  // "cpu", "cuda:0"
  virtual std::unique_ptr<pe::Program> create_program(const pe_program_desc& desc) = 0;
  virtual std::unique_ptr<pe::KvGroup> create_kv(const pe_kv_desc& desc) = 0;
  virtual void measure(const pe_limit_args& args) = 0;
  virtual void flush() = 0;
  // The contents of a tensor or rope table are about to be others.
  virtual void tensor_changes(const pe::Tensor&) {}
  virtual void rope_changes(const pe::RopeTable&) {}

  const pe::Tensor& tensor(int32_t id) const;  // throw Error(PE_REQUEST)
  const pe::RopeTable& rope(int32_t id) const;
  pe::KvGroup& kv(int32_t id) const;

  void pack(int32_t id, const pe_pack_args& args);
  void dequantize(int32_t id, float* out);
  void gather_tensors(const int32_t* ids, int32_t count);
  uint64_t write_tensors(const pe_tensor_file& file);  // bytes written
  std::vector<std::shared_ptr<pe::Tensor>> map_tensors(const pe_tensor_file& file);

  const pe::KernelTable& kernels;
  pe::Team team;
  std::vector<std::shared_ptr<pe::Tensor>> tensors;  // freed ids are null and used again; programs share them
  std::vector<std::unique_ptr<pe::RopeTable>> ropes;
  std::vector<std::unique_ptr<pe::KvGroup>> kv_groups;
};
