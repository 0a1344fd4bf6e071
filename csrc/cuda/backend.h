// The backend that computes on a CUDA device. Tensors are packed on the host by the CPU's code; the programs that use
// one share its copy in device memory.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "cuda/gemm.h"
#include "cuda/kernels.h"
#include "cuda/memory.h"
#include "runtime/backend.h"

namespace pe::cuda {

// A tensor's copy on the device. The host's stays as well: it can be packed again, or written to a file.
struct DeviceTensor {
  std::shared_ptr<Tensor> host;
  std::shared_ptr<DeviceMemory> memory;  // of all tensors that were brought together
  uint8_t* data = nullptr;               // tiles of a packed weight, else the rows
  float* units = nullptr;                // of a packed weight
  bool stale = true;                     // the host's contents are others
  const Packed& packed() const { return host->view(); }
  Matrix matrix() const;  // of a packed weight
  Table table() const;
};
using DeviceTensors = std::vector<std::shared_ptr<DeviceTensor>>;

class DeviceRope {
 public:
  DeviceRope(const RopeTable& host, Stream stream);
  Rope view() const;

 private:
  DeviceMemory memory_;
  size_t values_ = 0;  // floats before the scales
  bool scales_ = false;
  int32_t rotary_dim_ = 0;
};

class CudaBackend final : public pe_backend {
 public:
  CudaBackend(int threads, const char* isa, int device);
  ~CudaBackend() override;
  const char* device() const override { return name_.c_str(); }
  std::unique_ptr<Program> create_program(const pe_program_desc& desc) override;
  std::unique_ptr<KvGroup> create_kv(const pe_kv_desc& desc) override;
  void measure(const pe_limit_args& args) override;
  void flush() override;
  void tensor_changes(const Tensor& tensor) override;
  void rope_changes(const RopeTable& table) override;

  // upload.cc. The tensors' copies, with memory for those that have none yet; `others`: bytes wanted besides, for the
  // one error that says why it does not fit. upload: brings what is stale.
  DeviceTensors place_tensors(const std::vector<std::shared_ptr<Tensor>>& wanted, size_t others);
  void upload(const DeviceTensors& tensors);
  Rope rope_view(const RopeTable& table);

  void select() const { check_cuda(cudaSetDevice(index_), "selecting the device"); }  // of the calling thread
  Stream stream() const { return stream_; }
  Gemm& gemm() { return gemm_; }
  uint64_t changes() const { return changes_; }  // of contents
  uint64_t moves() const { return moves_; }      // of addresses: what was captured with them is void
  void moved() { ++moves_; }
  size_t kv_bytes() const;

 private:
  int index_;
  std::string name_;
  Stream stream_ = nullptr;
  Gemm gemm_;
  std::unordered_map<const Tensor*, std::weak_ptr<DeviceTensor>> copies_;
  std::unordered_map<const RopeTable*, DeviceRope> rope_copies_;
  uint64_t changes_ = 0, moves_ = 0;
};

// Blocks in device memory, as kv_layout.h has them.
class DeviceKvGroup final : public KvGroup {
 public:
  DeviceKvGroup(const pe_kv_desc& desc, CudaBackend& backend);
  void reserve(int32_t blocks) override;
  void flush() const override {}  // with everything else, by the backend
  size_t block_bytes() const override { return block_bytes_; }
  uint8_t* pool() const { return pool_.data(); }

 private:
  CudaBackend& backend_;
  size_t block_bytes_;
  DeviceMemory pool_;
};

}  // namespace pe::cuda
