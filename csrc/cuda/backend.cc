#include "cuda/backend.h"

#include "core/status.h"
#include "cuda/kv_layout.h"
#include "cuda/limits.h"
#include "cuda/program.h"

namespace pe::cuda {

namespace {

Stream make_stream(int device) {
  cudaDeviceProp properties{};
  check_cuda(cudaSetDevice(device), "selecting the device");
  check_cuda(cudaGetDeviceProperties(&properties, device), "asking what the device is");
  if (properties.major < 8)
    fail(PE_UNSUPPORTED, "%s has compute capability %d.%d; expected 8.0 or later", properties.name, properties.major,
         properties.minor);
  Stream stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
  return stream;
}

}  // namespace

CudaBackend::CudaBackend(int threads, const char* isa, int device)
    : pe_backend(threads, isa), index_(device), name_("cuda:" + std::to_string(device)), stream_(make_stream(device)) {}

CudaBackend::~CudaBackend() {
  cudaSetDevice(index_);
  cudaStreamSynchronize(stream_);
  cudaStreamDestroy(stream_);
}

std::unique_ptr<Program> CudaBackend::create_program(const pe_program_desc& desc) {
  select();
  return std::make_unique<CudaProgram>(*this, desc);
}

std::unique_ptr<KvGroup> CudaBackend::create_kv(const pe_kv_desc& desc) {
  return std::make_unique<DeviceKvGroup>(desc, *this);
}

void CudaBackend::measure(const pe_limit_args& args) {
  select();
  measure_limit(stream_, args);
}

// Writes more than the second level cache holds.
void CudaBackend::flush() {
  select();
  int bytes = 0;
  check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, index_), "asking for the size of the cache");
  const DeviceMemory memory(2 * static_cast<size_t>(bytes));
  if (!memory.size()) return;
  check_cuda(cudaMemsetAsync(memory.data(), 0, memory.size(), stream_), "flushing the cache");
  check_cuda(cudaStreamSynchronize(stream_), "flushing the cache");
}

void CudaBackend::tensor_changes(const Tensor& tensor) {
  const auto found = copies_.find(&tensor);
  if (found == copies_.end()) return;
  if (const auto copy = found->second.lock()) {
    copy->stale = true;
    ++changes_;
  } else {
    copies_.erase(found);
  }
}

void CudaBackend::rope_changes(const RopeTable& table) {
  if (rope_copies_.erase(&table)) moved();
}

size_t CudaBackend::kv_bytes() const {
  size_t bytes = 0;
  for (const auto& group : kv_groups)
    if (group) bytes += group->block_bytes() * static_cast<size_t>(group->blocks());
  return bytes;
}

// ---- rope tables ----------------------------------------------------------------------------------------------------

DeviceRope::DeviceRope(const RopeTable& host, Stream stream)
    : memory_((host.values.size() + host.q_scales.size()) * sizeof(float)),
      values_(host.values.size()),
      scales_(!host.q_scales.empty()),
      rotary_dim_(host.rotary_dim) {
  const auto copy = [&](size_t at, const std::vector<float>& from) {
    if (!from.empty())
      check_cuda(cudaMemcpyAsync(memory_.data() + at, from.data(), from.size() * sizeof(float), cudaMemcpyHostToDevice,
                                 stream),
                 "copying a rope table");
  };
  copy(0, host.values);
  copy(values_ * sizeof(float), host.q_scales);
}

Rope DeviceRope::view() const {
  const auto* values = reinterpret_cast<const float*>(memory_.data());
  return {values, scales_ ? values + values_ : nullptr, rotary_dim_};
}

Rope CudaBackend::rope_view(const RopeTable& table) {
  const auto found = rope_copies_.find(&table);
  return (found != rope_copies_.end() ? found : rope_copies_.emplace(&table, DeviceRope(table, stream_)).first)
      ->second.view();
}

// ---- KV -------------------------------------------------------------------------------------------------------------

DeviceKvGroup::DeviceKvGroup(const pe_kv_desc& desc, CudaBackend& backend)
    : KvGroup(desc), backend_(backend), block_bytes_(static_cast<size_t>(kv_layout(desc).block_bytes)) {}

// The old contents are copied on the device where both pools fit, else by way of the host.
void DeviceKvGroup::reserve(int32_t blocks) {
  if (blocks <= blocks_) return;
  backend_.select();
  const Stream stream = backend_.stream();
  const size_t wanted = static_cast<size_t>(blocks) * block_bytes_, old = pool_.size();
  size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "asking for free memory");
  if (wanted > free + old)
    fail(PE_RESOURCE, "not enough memory on the device: a KV cache of %d blocks needs %s; free %s and its own %s of %s",
         blocks, text_of_bytes(wanted).c_str(), text_of_bytes(free).c_str(), text_of_bytes(old).c_str(),
         text_of_bytes(total).c_str());
  check_cuda(cudaStreamSynchronize(stream), "growing the KV cache");
  std::vector<uint8_t> aside(wanted > free ? old : 0);
  if (!aside.empty()) {
    check_cuda(cudaMemcpy(aside.data(), pool_.data(), old, cudaMemcpyDeviceToHost), "growing the KV cache");
    blocks_ = 0;  // what is lost if the next allocation fails
    pool_ = DeviceMemory();
    backend_.moved();
  }
  DeviceMemory grown(wanted);
  if (!aside.empty())
    check_cuda(cudaMemcpyAsync(grown.data(), aside.data(), old, cudaMemcpyHostToDevice, stream),
               "growing the KV cache");
  else if (old)
    check_cuda(cudaMemcpyAsync(grown.data(), pool_.data(), old, cudaMemcpyDeviceToDevice, stream),
               "growing the KV cache");
  check_cuda(cudaMemsetAsync(grown.data() + old, 0, wanted - old, stream), "growing the KV cache");
  check_cuda(cudaStreamSynchronize(stream), "growing the KV cache");
  pool_ = std::move(grown);
  blocks_ = blocks;
  backend_.moved();
}

}  // namespace pe::cuda
