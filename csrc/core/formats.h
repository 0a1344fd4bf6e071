// Sizes of the packed layout P16 (docs/packed_formats.md) and of the other tensor forms.
#pragma once

#include <memory>

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
  uint64_t checksum;  // of the data, on disk; 0 in a tensor that was packed here
  uint64_t reserved2;
};
static_assert(sizeof(TensorHeader) == 64);

bool is_packed(int32_t format);   // P16: panels
bool is_integer(int32_t format);  // takes quantized activations
const char* format_name(int32_t format);

size_t tensor_size(const pe_tensor_desc& desc);  // bytes, header included; checks the description

// A tensor: header, then panels or rows.
class Tensor {
 public:
  explicit Tensor(const pe_tensor_desc& desc);  // in a zeroed allocation of its own
  // A copy at `offset` of memory that has room for it.
  Tensor(const Tensor& from, std::shared_ptr<Memory> memory, size_t offset);
  // At `offset` of a mapped file that holds all of it. Throws Error(PE_FORMAT) where the header there is another's.
  Tensor(const pe_tensor_desc& desc, std::shared_ptr<Memory> file, size_t offset);
  const Packed& view() const { return view_; }
  const TensorHeader& header() const { return *reinterpret_cast<const TensorHeader*>(bytes_); }
  uint8_t* bytes() const { return bytes_; }
  size_t size() const { return size_; }
  bool writable() const { return !mapped_; }

 private:
  Packed view_{};
  uint8_t* bytes_;
  size_t size_;
  bool mapped_;
  std::shared_ptr<Memory> memory_;
};

}  // namespace pe
