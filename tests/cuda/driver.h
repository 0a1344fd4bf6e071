// For drivers of kernel tests: arrays on the device, rows as the runtime lays them out, errors as a status.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "core/status.h"
#include "cuda/kernels.h"

namespace pe::cuda {

inline void must(cudaError_t error) {
  if (error != cudaSuccess) fail(PE_RESOURCE, "CUDA: %s", cudaGetErrorString(error));
}

template <class T>
class Array {  // zeros, or a copy of what the host has there
 public:
  explicit Array(int64_t n) : n_(n > 0 ? static_cast<size_t>(n) : 0) {
    must(cudaMalloc(reinterpret_cast<void**>(&data_), (n_ ? n_ : 1) * sizeof(T)));
    must(cudaMemset(data_, 0, (n_ ? n_ : 1) * sizeof(T)));
  }
  Array(const T* host, int64_t n) : Array(host ? n : 0) {
    if (host) must(cudaMemcpy(data_, host, n_ * sizeof(T), cudaMemcpyHostToDevice));
    given_ = host != nullptr;
  }
  Array(const Array&) = delete;
  ~Array() { cudaFree(data_); }
  T* data() const { return data_; }
  T* or_null() const { return given_ ? data_ : nullptr; }  // where the host gave none
  void read(T* host) const {
    if (host && n_) must(cudaMemcpy(host, data_, n_ * sizeof(T), cudaMemcpyDeviceToHost));
  }

 private:
  T* data_ = nullptr;
  size_t n_;
  bool given_ = true;
};

constexpr int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// float32 [count][width] in rows of a stride; what pads them is NaN, so that reading it shows.
class FloatRows {
 public:
  FloatRows(const float* host, int64_t count, int64_t width)
      : count_(count), stride_(up(width, kPanel) + kPanel), width_(width), data_(count * stride_) {
    std::vector<float> all(static_cast<size_t>(count * stride_), __builtin_nanf(""));
    for (int64_t r = 0; host && r < count; ++r)
      for (int64_t c = 0; c < width; ++c) all[static_cast<size_t>(r * stride_ + c)] = host[r * width + c];
    must(cudaMemcpy(data_.data(), all.data(), all.size() * 4, cudaMemcpyHostToDevice));
  }
  Rows rows() const {
    Rows r;
    r.f = data_.data();
    r.stride = stride_;
    r.width = width_;
    return r;
  }
  void read(float* host) const {
    std::vector<float> all(static_cast<size_t>(count_ * stride_));
    data_.read(all.data());
    for (int64_t r = 0; host && r < count_; ++r)
      for (int64_t c = 0; c < width_; ++c) host[r * width_ + c] = all[static_cast<size_t>(r * stride_ + c)];
  }

 private:
  int64_t count_, stride_, width_;
  Array<float> data_;
};

// Quantized rows as numpy arrays: q [n][groups * 64], the others [n][groups] or, of halves, [n][2 * groups].
struct HostQuant {
  int8_t* q;
  float *scale, *scaled_sum64, *scaled_sum32;
  int32_t *negative_sum64, *negative_sum32;
  float* outlier_value;
  uint8_t* outlier_column;
};

class QuantRows {
 public:
  QuantRows(int64_t count, int64_t width)
      : count_(count),
        width_(width),
        groups_((width + kActGroup - 1) / kActGroup),
        n_(count * groups_),
        q_(count * (groups_ + 1) * kActGroup),
        scale_(n_),
        sum64_(n_),
        sum32_(2 * n_),
        value_(n_),
        negative64_(n_),
        negative32_(2 * n_),
        column_(count * up(groups_, 8)) {}
  Rows rows() const {
    Rows r;
    r.width = width_;
    r.stride = (groups_ + 1) * kActGroup;
    r.quantized = true;
    r.quant = {q_.data(),
               scale_.data(),
               sum64_.data(),
               sum32_.data(),
               negative64_.data(),
               negative32_.data(),
               value_.data(),
               column_.data(),
               up(groups_, 8),
               (groups_ + 1) * kActGroup,
               groups_};
    return r;
  }
  void read(const HostQuant* host) const {
    if (!host) return;
    scale_.read(host->scale);
    sum64_.read(host->scaled_sum64);
    sum32_.read(host->scaled_sum32);
    negative64_.read(host->negative_sum64);
    negative32_.read(host->negative_sum32);
    value_.read(host->outlier_value);
    const int64_t stride = (groups_ + 1) * kActGroup, columns = up(groups_, 8);
    std::vector<int8_t> q(static_cast<size_t>(count_ * stride));
    std::vector<uint8_t> column(static_cast<size_t>(count_ * columns));
    q_.read(q.data());
    column_.read(column.data());
    for (int64_t r = 0; r < count_; ++r) {
      for (int64_t c = 0; c < groups_ * kActGroup; ++c)
        host->q[r * groups_ * kActGroup + c] = q[static_cast<size_t>(r * stride + c)];
      for (int64_t g = 0; g < groups_; ++g)
        host->outlier_column[r * groups_ + g] = column[static_cast<size_t>(r * columns + g)];
    }
  }

 private:
  int64_t count_, width_, groups_, n_;
  Array<int8_t> q_;
  Array<float> scale_, sum64_, sum32_, value_;
  Array<int32_t> negative64_, negative32_;
  Array<uint8_t> column_;
};

// Runs body(stream) and waits for all that it launched.
template <class F>
int driven(F&& body) {
  return guarded([&] {
    cudaStream_t stream;
    must(cudaStreamCreate(&stream));
    body(stream);
    must(cudaStreamSynchronize(stream));
    must(cudaStreamDestroy(stream));
  });
}

}  // namespace pe::cuda

extern "C" const char* driver_error();
