// What core_bits records and compares, the activations it feeds, and the sizes its programs share.
#pragma once

#include <algorithm>
#include <functional>

#include "c_client.h"

namespace {

constexpr int64_t kHidden = 104, kInter = 76, kVocab = 91;
constexpr int32_t kMaxTokens = 300, kBlocks = 12;

struct Output {
  std::string what;
  std::vector<uint8_t> bytes;
};

int failures = 0;

class Recorder {
 public:
  explicit Recorder(std::vector<Output>& to) : to_(to) {}
  template <class T>
  void add(const std::string& what, const std::vector<T>& values) {
    const auto* p = reinterpret_cast<const uint8_t*>(values.data());
    to_.push_back({what, {p, p + values.size() * sizeof(T)}});
  }

 private:
  std::vector<Output>& to_;
};

// x [tokens, width] with what quantization treats apart: a lone large value, a zero row, tiny and huge rows.
std::vector<float> activations(int64_t tokens, int64_t width, Random& random) {
  std::vector<float> x = random.normal(tokens * width);
  for (int64_t t = 0; t < tokens; ++t) {
    float* row = x.data() + t * width;
    if (t % 3 == 1) row[(7 * t) % width] *= 300.0f;
    if (t % 7 == 2) std::fill(row, row + width, 0.0f);
    if (t % 7 == 4)
      for (int64_t k = 0; k < width; ++k) row[k] *= 1e-38f;
    if (t % 7 == 5)
      for (int64_t k = 0; k < width; ++k) row[k] *= 1e20f;
  }
  return x;
}

std::vector<float> run_hidden(pe_program* program, const std::vector<float>& x, int32_t tokens, int64_t width) {
  std::vector<int32_t> positions(static_cast<size_t>(tokens)), start{0, tokens};
  for (int32_t t = 0; t < tokens; ++t) positions[static_cast<size_t>(t)] = t;
  std::vector<float> out(static_cast<size_t>(tokens * width));
  float* taps[] = {out.data()};
  auto batch = sized<pe_batch>();
  batch.tokens = tokens;
  batch.sequences = 1;
  batch.positions = positions.data();
  batch.query_start = start.data();
  batch.hidden = x.data();
  batch.taps = taps;
  good(pe_program_run(program, &batch));
  return out;
}

pe_program* linear_program(Client& c, const Format& f, int32_t weight, int32_t bias, int64_t rows, int64_t cols,
                           int32_t tokens) {
  pe_op linear = make_op(PE_OP_LINEAR, f.integer() ? 1 : 0, 2), tap = make_op(PE_OP_TAP, 2, -1);
  linear.weight = weight;
  linear.bias = bias;
  std::vector<pe_op> ops{make_op(PE_OP_LOAD_HIDDEN, -1, 0), linear, tap};
  if (f.integer()) ops.insert(ops.begin() + 1, make_op(PE_OP_QUANTIZE, 0, 1));
  return c.program(ops, {make_buffer(cols), make_buffer(cols, true), make_buffer(rows)}, tokens);
}

}  // namespace
