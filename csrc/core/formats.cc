#include "core/formats.h"

#include <cstring>

#include "core/status.h"

namespace pe {

bool is_packed(int32_t format) { return format >= PE_F32 && format <= PE_INT4_MIN; }
bool is_integer(int32_t format) { return format >= PE_INT8 && format <= PE_INT4_MIN; }

const char* format_name(int32_t format) {
  static const char* const names[] = {"f32",          "bf16",     "int8",      "int4 symmetric",
                                      "int4 minimum", "rows f32", "rows bf16", "vector f32"};
  return format >= 0 && format <= PE_VECTOR_F32 ? names[format] : "unknown";
}

namespace {

constexpr int64_t kMaxSide = int64_t{1} << 31;  // rows and columns stay far from any overflow of their product

void check(const pe_tensor_desc& d) {
  if (d.format < 0 || d.format > PE_VECTOR_F32) fail(PE_REQUEST, "tensor format %d is unknown", d.format);
  if (d.rows < 1 || d.cols < 1 || d.rows >= kMaxSide || d.cols >= kMaxSide)
    fail(PE_REQUEST, "tensor of %lld x %lld; expected sides of 1 to 2^31 - 1", static_cast<long long>(d.rows),
         static_cast<long long>(d.cols));
  const bool int4 = d.format == PE_INT4_SYM || d.format == PE_INT4_MIN;
  if (int4 && d.group != 32 && d.group != 64 && d.group != 128)
    fail(PE_UNSUPPORTED, "int4 group size %d; expected 32, 64 or 128", d.group);
  if (d.format == PE_INT8 && d.group != 64) fail(PE_UNSUPPORTED, "int8 group size %d; expected 64", d.group);
  if (!is_integer(d.format) && d.group != 0) fail(PE_REQUEST, "format %s has no groups", format_name(d.format));
  if (d.format == PE_VECTOR_F32 && d.rows != 1) fail(PE_REQUEST, "a vector has one row");
}

int64_t columns_in_step(int32_t format) {
  switch (format) {
    case PE_INT4_SYM:
    case PE_INT4_MIN: return 8;
    case PE_INT8: return 4;
    case PE_BF16: return 2;
    default: return 1;
  }
}

size_t bytes_of_columns(int32_t format, int64_t columns) {  // of 16 rows
  switch (format) {
    case PE_INT4_SYM:
    case PE_INT4_MIN: return static_cast<size_t>(columns) * 8;
    case PE_INT8: return static_cast<size_t>(columns) * 16;
    case PE_BF16: return static_cast<size_t>(columns) * 32;
    default: return static_cast<size_t>(columns) * 64;
  }
}

// Where everything is, all but the pointer to the data; data_bytes: what follows the header.
Packed layout(const pe_tensor_desc& d, size_t& data_bytes) {
  check(d);
  Packed v{};
  v.format = d.format;
  v.group = d.group;
  v.rows = d.rows;
  v.cols = d.cols;
  const int64_t step = columns_in_step(d.format);
  v.padded_cols = (d.cols + step - 1) / step * step;
  if (is_packed(d.format)) {
    v.panels = (d.rows + kPanel - 1) / kPanel;
    v.groups = d.group ? (d.cols + d.group - 1) / d.group : 0;
    const size_t values = static_cast<size_t>(v.groups) * kPanel;
    if (d.format == PE_INT4_MIN) {
      v.scale_offset = 2 * kPanel * sizeof(float);
      v.minimum_offset = v.scale_offset + align_up(values, kAlign);
      v.data_offset = v.minimum_offset + align_up(values, kAlign);
    } else if (d.group) {
      v.scale_offset = kPanel * sizeof(float);
      v.data_offset = v.scale_offset + align_up(values * 2, kAlign);
    }
    v.panel_bytes = align_up(v.data_offset + bytes_of_columns(d.format, v.padded_cols), kAlign);
    data_bytes = v.panel_bytes * static_cast<size_t>(v.panels);
  } else {
    const size_t element = d.format == PE_ROWS_BF16 ? 2 : 4;
    // vectors are read in whole panels of 16
    data_bytes = align_up(static_cast<size_t>(d.rows) * static_cast<size_t>(d.cols) * element, kAlign);
  }
  return v;
}

TensorHeader header_of(const pe_tensor_desc& d, size_t data_bytes) {
  TensorHeader header{};
  std::memcpy(header.magic, "PYENGP16", 8);
  header.layout_version = PE_LAYOUT_VERSION;
  header.format = d.format;
  header.group = d.group;
  header.rows = d.rows;
  header.cols = d.cols;
  header.data_bytes = data_bytes;
  return header;
}

}  // namespace

size_t tensor_size(const pe_tensor_desc& d) {
  size_t data_bytes;
  layout(d, data_bytes);
  return sizeof(TensorHeader) + data_bytes;
}

Tensor::Tensor(const pe_tensor_desc& d) : mapped_(false) {
  size_t data_bytes;
  view_ = layout(d, data_bytes);
  size_ = sizeof(TensorHeader) + data_bytes;
  memory_ = std::make_shared<Memory>(size_);
  bytes_ = memory_->data();
  view_.data = bytes_ + sizeof(TensorHeader);
  const TensorHeader header = header_of(d, data_bytes);
  std::memcpy(bytes_, &header, sizeof header);
}

Tensor::Tensor(const Tensor& from, std::shared_ptr<Memory> memory, size_t offset)
    : view_(from.view_),
      bytes_(memory->data() + offset),
      size_(from.size_),
      mapped_(false),
      memory_(std::move(memory)) {
  std::memcpy(bytes_, from.bytes_, size_);
  view_.data = bytes_ + sizeof(TensorHeader);
}

Tensor::Tensor(const pe_tensor_desc& d, std::shared_ptr<Memory> file, size_t offset)
    : mapped_(true), memory_(std::move(file)) {
  size_t data_bytes;
  view_ = layout(d, data_bytes);
  size_ = sizeof(TensorHeader) + data_bytes;
  bytes_ = memory_->data() + offset;
  view_.data = bytes_ + sizeof(TensorHeader);
  TensorHeader expected = header_of(d, data_bytes);
  expected.checksum = header().checksum;
  if (std::memcmp(bytes_, &expected, sizeof expected) != 0)
    fail(PE_FORMAT, "the header at byte %zu is not that of a %s tensor of %lld x %lld", offset, format_name(d.format),
         static_cast<long long>(d.rows), static_cast<long long>(d.cols));
}

}  // namespace pe
