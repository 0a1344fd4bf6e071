// For drivers whose kernels take weights: a packed tensor as the CPU core holds it, header included, in device memory.
#pragma once

#include <cstring>

#include "cuda/repack.h"
#include "driver.h"

namespace pe::cuda {

class DeviceMatrix {
 public:
  explicit DeviceMatrix(const uint8_t* raw)
      : tensor_(desc_of(raw)),
        packed_(tensor_.view()),
        tiles_(static_cast<int64_t>(repacked_bytes(packed_))),
        units_(static_cast<int64_t>(repacked_units(packed_))) {
    std::memcpy(tensor_.bytes(), raw, tensor_.size());
    std::vector<uint8_t> tiles(repacked_bytes(packed_), 0xff);
    std::vector<float> units(repacked_units(packed_) + 1);
    const int64_t half = packed_.panels / 2;  // ranges of panels, as threads take them
    repack(packed_, half, packed_.panels, tiles.data(), units.data());
    repack(packed_, 0, half, tiles.data(), units.data());
    must(cudaMemcpy(tiles_.data(), tiles.data(), tiles.size(), cudaMemcpyHostToDevice));
    if (repacked_units(packed_))
      must(cudaMemcpy(units_.data(), units.data(), repacked_units(packed_) * 4, cudaMemcpyHostToDevice));
  }
  Matrix matrix() const { return matrix_view(packed_, tiles_.data(), units_.data()); }
  int64_t rows() const { return packed_.panels * kPanel; }  // padded
  int64_t cols() const { return packed_.cols; }
  bool integer() const { return is_integer(packed_.format); }
  const Array<uint8_t>& tiles() const { return tiles_; }

 private:
  static pe_tensor_desc desc_of(const uint8_t* raw) {
    TensorHeader header;
    std::memcpy(&header, raw, sizeof header);
    return {sizeof(pe_tensor_desc), header.format, header.rows, header.cols, header.group};
  }
  Tensor tensor_;
  Packed packed_;
  Array<uint8_t> tiles_;
  Array<float> units_;
};

// Activations as a weight takes them.
class Activations {
 public:
  Activations(Stream stream, const float* x, int64_t tokens, int64_t width, bool integer)
      : floats_(x, tokens, width), quants_(tokens, width), integer_(integer) {
    if (integer && x) quantize(stream, floats_.rows(), quants_.rows(), static_cast<int>(tokens));
  }
  Rows rows() const { return integer_ ? quants_.rows() : floats_.rows(); }

 private:
  FloatRows floats_;
  QuantRows quants_;
  bool integer_;
};

inline Linear linear_of(const DeviceMatrix& w, const Activations& in, const FloatRows& out, const Array<float>& bias,
                        float factor, int64_t tokens) {
  Linear l;
  l.weight = w.matrix();
  l.in = in.rows();
  l.out = out.rows();
  l.bias = bias.or_null();
  l.factor = factor;
  l.tokens = static_cast<int>(tokens);
  return l;
}

}  // namespace pe::cuda
