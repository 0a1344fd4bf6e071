// Tensors into device memory: repacked by the backend's threads into memory that copies take from directly, one part
// while the one before is on its way.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "core/status.h"
#include "cuda/backend.h"
#include "cuda/repack.h"

namespace pe::cuda {

namespace {

constexpr size_t kStagingBytes = size_t{32} << 20;
constexpr size_t kDeviceAlign = 256;

size_t data_bytes(const Packed& t) {
  if (is_packed(t.format)) return repacked_bytes(t);
  return static_cast<size_t>(t.rows * t.cols) * (t.format == PE_ROWS_BF16 ? 2 : 4);
}

// Biases are read in whole panels, vectors of norms in whole warps: zeros behind the last value.
size_t padded_bytes(const Packed& t) { return align_up(data_bytes(t) + 64, kDeviceAlign); }

size_t units_bytes(const Packed& t) {
  return is_packed(t.format) ? align_up(repacked_units(t) * sizeof(float), kDeviceAlign) : 0;
}

size_t device_bytes(const Packed& t) { return padded_bytes(t) + units_bytes(t); }

// Two parts of pinned memory, taken in turn.
class Staging {
 public:
  Staging(size_t bytes, Stream stream) : memory_(2 * bytes), bytes_(bytes), stream_(stream) {}
  size_t bytes() const { return bytes_; }
  uint8_t* next() {
    at_ ^= 1;
    if (used_[at_]) events_[at_].wait();
    return memory_.data() + static_cast<size_t>(at_) * bytes_;
  }
  void send(uint8_t* to, size_t bytes) {
    check_cuda(
        cudaMemcpyAsync(to, memory_.data() + static_cast<size_t>(at_) * bytes_, bytes, cudaMemcpyHostToDevice, stream_),
        "copying a tensor");
    events_[at_].record(stream_);
    used_[at_] = true;
  }

 private:
  PinnedMemory memory_;
  size_t bytes_;
  Stream stream_;
  int at_ = 0;
  bool used_[2] = {false, false};
  Event events_[2] = {Event(false), Event(false)};
};

void send_rows(const DeviceTensor& t, Staging& staging) {
  const size_t bytes = data_bytes(t.packed());
  for (size_t at = 0; at < bytes; at += staging.bytes()) {
    const size_t part = std::min(staging.bytes(), bytes - at);
    std::memcpy(staging.next(), t.packed().data + at, part);
    staging.send(t.data + at, part);
  }
}

void send_packed(const DeviceTensor& t, Staging& staging, Team& team, Stream stream) {
  const Packed& w = t.packed();
  const size_t panel_bytes = repacked_bytes(w) / static_cast<size_t>(w.panels);
  const size_t unit_count = repacked_units(w);
  std::vector<float> units(unit_count);
  const auto step = static_cast<int64_t>(staging.bytes() / panel_bytes);
  for (int64_t begin = 0; begin < w.panels; begin += step) {
    const int64_t end = std::min(begin + step, w.panels);
    uint8_t* part = staging.next();
    std::atomic<int64_t> panel{begin};
    team.run([&](int) {
      for (int64_t p; (p = panel.fetch_add(1)) < end;)
        repack(w, p, p + 1, part - static_cast<size_t>(begin) * panel_bytes, units.data());
    });
    staging.send(t.data + static_cast<size_t>(begin) * panel_bytes, static_cast<size_t>(end - begin) * panel_bytes);
  }
  if (unit_count)
    check_cuda(cudaMemcpyAsync(t.units, units.data(), unit_count * sizeof(float), cudaMemcpyHostToDevice, stream),
               "copying a tensor's units");
}

size_t staging_bytes(const DeviceTensors& tensors) {
  size_t wanted = 64;
  for (const auto& t : tensors) {
    const Packed& p = t->packed();
    if (!t->stale) continue;
    wanted = std::max(wanted, std::min(kStagingBytes, data_bytes(p)));
    if (is_packed(p.format)) wanted = std::max(wanted, data_bytes(p) / static_cast<size_t>(p.panels));
  }
  return align_up(wanted, kDeviceAlign);
}

}  // namespace

Matrix DeviceTensor::matrix() const {
  return is_packed(packed().format) ? matrix_view(packed(), data, units) : Matrix{};
}

Table DeviceTensor::table() const {
  const Packed& p = packed();
  return {is_packed(p.format) ? nullptr : data, matrix(), p.format, p.rows, p.cols};
}

DeviceTensors CudaBackend::place_tensors(const std::vector<std::shared_ptr<Tensor>>& wanted, size_t others) {
  DeviceTensors all, fresh;
  size_t bytes = 0;
  for (const auto& host : wanted) {
    std::weak_ptr<DeviceTensor>& known = copies_[host.get()];
    auto copy = known.lock();
    if (!copy) {
      copy = std::make_shared<DeviceTensor>();
      copy->host = host;
      known = copy;
      fresh.push_back(copy);
      bytes += device_bytes(host->view());
    }
    if (std::find(all.begin(), all.end(), copy) == all.end()) all.push_back(copy);
  }
  check_room(bytes + others, "weights " + text_of_bytes(bytes) + ", buffers " + text_of_bytes(others) +
                                 ", beside a KV cache of " + text_of_bytes(kv_bytes()));
  const auto memory = std::make_shared<DeviceMemory>(bytes);
  if (bytes) check_cuda(cudaMemsetAsync(memory->data(), 0, bytes, stream_), "clearing memory");
  uint8_t* at = memory->data();
  for (const auto& copy : fresh) {
    copy->memory = memory;
    copy->data = at;
    copy->units = reinterpret_cast<float*>(at + padded_bytes(copy->packed()));
    at += device_bytes(copy->packed());
  }
  return all;
}

void CudaBackend::upload(const DeviceTensors& tensors) {
  if (std::none_of(tensors.begin(), tensors.end(), [](const auto& t) { return t->stale; })) return;
  Staging staging(staging_bytes(tensors), stream_);
  for (const auto& t : tensors) {
    if (!t->stale) continue;
    if (is_packed(t->packed().format))
      send_packed(*t, staging, team, stream_);
    else
      send_rows(*t, staging);
    t->stale = false;
  }
  check_cuda(cudaStreamSynchronize(stream_), "copying tensors");
}

}  // namespace pe::cuda
