// Sizes of the packed layout P16 (docs/packed_formats.md) and of the other tensor forms.
#pragma once

#include "core/memory.h"
#include "cpu/kernel_table.h"
#include "pyengine.h"

namespace pe {

// The 64 bytes in front of every tensor.
struct TensorHeader {
  char magic[8];  // "PYENGP16"
  int32_t layout_version;
  int32_t format, group;
  int32_t reserved;
  int64_t rows, cols;
  uint64_t data_bytes;
  uint64_t checksum;  // set by whoever writes the bytes to disk; 0 in memory
  uint64_t reserved2;
};
static_assert(sizeof(TensorHeader) == 64);

bool is_packed(int32_t format);   // P16: panels
bool is_integer(int32_t format);  // takes quantized activations
const char* format_name(int32_t format);

// A tensor: header, then panels or rows, in one zeroed allocation.
class Tensor {
 public:
  explicit Tensor(const pe_tensor_desc& desc);  // checks the description
  const Packed& view() const { return view_; }
  uint8_t* bytes() const { return memory_.data(); }
  size_t size() const { return size_; }

 private:
  Packed view_{};
  size_t size_ = 0;
  Memory memory_;
};

}  // namespace pe
