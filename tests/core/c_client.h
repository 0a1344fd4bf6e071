// A client of the C ABI for test programs: tensors, programs and batches in a few lines, every status checked.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "pyengine.h"

struct Format {
  const char* name;
  int32_t format, group;
  bool integer() const { return group != 0; }
};

inline const Format kFormats[] = {
    {"f32", PE_F32, 0},
    {"bf16", PE_BF16, 0},
    {"int8", PE_INT8, 64},
    {"int4_symmetric_32", PE_INT4_SYM, 32},
    {"int4_symmetric_64", PE_INT4_SYM, 64},
    {"int4_symmetric_128", PE_INT4_SYM, 128},
    {"int4_minimum_32", PE_INT4_MIN, 32},
    {"int4_minimum_64", PE_INT4_MIN, 64},
    {"int4_minimum_128", PE_INT4_MIN, 128},
};

inline int64_t up16(int64_t n) { return (n + 15) / 16 * 16; }

// Reproducible on every machine: splitmix64 (Steele et al. 2014), four uniforms to a bell curve of deviation 1.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  std::vector<float> normal(int64_t n) {
    std::vector<float> x(static_cast<size_t>(n));
    for (float& v : x) {
      int64_t sum = 0;
      for (int i = 0; i < 4; ++i) sum += static_cast<int64_t>(bits() >> 44) - (1 << 19);
      v = static_cast<float>(sum) * (1.0f / 605473.0f);
    }
    return x;
  }

 private:
  uint64_t state_;
};

template <class T>
T sized() {
  T s;
  std::memset(&s, 0, sizeof s);
  s.struct_size = sizeof s;
  return s;
}

inline void good(pe_status status) {
  if (status == PE_OK) return;
  std::fprintf(stderr, "status %d: %s\n", static_cast<int>(status), pe_last_error());
  std::exit(1);
}

class Client {
 public:
  Client(const char* isa, int32_t threads) {
    auto config = sized<pe_backend_config>();
    config.isa = isa;
    config.threads = threads;
    good(pe_backend_create(&config, &backend));
  }
  ~Client() {
    for (pe_program* p : programs_) pe_program_destroy(p);
    pe_backend_destroy(backend);
  }
  Client(const Client&) = delete;

  int32_t tensor(int32_t format, int64_t rows, int64_t cols, int32_t group = 0) {
    auto desc = sized<pe_tensor_desc>();
    desc.format = format;
    desc.rows = rows;
    desc.cols = cols;
    desc.group = group;
    int32_t id = -1;
    good(pe_tensor_create(backend, &desc, &id));
    return id;
  }
  void pack(int32_t id, const std::vector<float>& source, int64_t rows, int64_t panel = 0, int64_t panel_stride = 1) {
    auto args = sized<pe_pack_args>();
    args.source = source.data();
    args.rows = rows;
    args.panel_offset = panel;
    args.panel_stride = panel_stride;
    good(pe_tensor_pack(backend, id, &args));
  }
  int32_t matrix(const Format& f, int64_t rows, int64_t cols, Random& random) {
    const int32_t id = tensor(f.format, rows, cols, f.group);
    pack(id, random.normal(rows * cols), rows);
    return id;
  }
  int32_t vector(std::vector<float> values, size_t padded = 0) {
    if (values.size() < padded) values.resize(padded);
    const int32_t id = tensor(PE_VECTOR_F32, 1, static_cast<int64_t>(values.size()));
    pack(id, values, 1);
    return id;
  }
  std::vector<uint8_t> bytes(int32_t id) {
    void* data;
    size_t size;
    good(pe_tensor_data(backend, id, &data, &size));
    return {static_cast<uint8_t*>(data), static_cast<uint8_t*>(data) + size};
  }
  pe_program* program(const std::vector<pe_op>& ops, const std::vector<pe_buffer_desc>& buffers, int32_t tokens) {
    auto desc = sized<pe_program_desc>();
    desc.op_count = static_cast<int32_t>(ops.size());
    desc.buffer_count = static_cast<int32_t>(buffers.size());
    desc.ops = ops.data();
    desc.buffers = buffers.data();
    desc.max_batch_tokens = desc.max_sequences = tokens;
    pe_program* made = nullptr;
    good(pe_program_create(backend, &desc, &made));
    programs_.push_back(made);
    return made;
  }

  pe_backend* backend = nullptr;

 private:
  std::vector<pe_program*> programs_;
};

inline pe_op make_op(int32_t kind, int32_t input, int32_t output) {
  auto op = sized<pe_op>();
  op.kind = kind;
  op.input = input;
  op.output = output;
  op.scratch = op.routing = op.rows = op.weight = op.weight2 = op.bias = op.bias2 = -1;
  op.norm = op.norm2 = op.norm_bias = -1;
  op.rope = op.kv_group = op.kv_layer = op.layer = -1;
  op.eps = 1e-6f;
  return op;
}

inline pe_buffer_desc make_buffer(int64_t width, bool quantized = false) {
  auto b = sized<pe_buffer_desc>();
  b.width = width;
  b.quantized = quantized;
  return b;
}
