// Products with many tokens by cuBLASLt, which is opened when a backend is made. Where the library is missing, or lacks
// a function, the kernels of linear.cu take the tokens in chunks of 8, and describe() says so.
#pragma once

#include <map>
#include <string>
#include <tuple>

#include "cuda/cublaslt.h"
#include "cuda/kernels.h"

namespace pe::cuda {

class Gemm {
 public:
  // path: of the library; nullptr: libcublasLt.so.13 or .12, wherever the loader finds it.
  explicit Gemm(const char* path = nullptr);
  ~Gemm();
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;

  bool available() const { return handle_ != nullptr; }
  // Whether it is worth it. What is converted is read, written as bfloat16 or float32 and read again, 8 times the bytes
  // of an int4 weight and 3 times those of a float one; the chunks of 8 read the weight once each, and keep the bits of
  // a row.
  bool takes(const Matrix& m, int tokens) const { return available() && tokens > (m.group ? 32 : 16); }
  const std::string& describe() const { return description_; }  // "cuBLASLt 13.0.2", or what is used instead and why

  // c [n][c_stride] = alpha * b [n][b_stride] . a [m][a_stride]^T (+ c where `add`), all row-major, sums over k
  // columns. a and b: `type`; c: float32. Every stride and pointer: a multiple of 16 bytes.
  struct Product {
    int32_t type = kLtBfloat16;
    int64_t m = 0, n = 0, k = 0, a_stride = 0, b_stride = 0, c_stride = 0;
    const void *a = nullptr, *b = nullptr;
    float* c = nullptr;
    float alpha = 1;
    bool add = false;
  };
  void run(Stream, const Product&, void* workspace);

  static constexpr size_t kWorkspaceBytes = size_t{32} << 20;

 private:
  struct Plan {  // of a shape
    LtMatmulDesc desc = nullptr;
    LtLayout a = nullptr, b = nullptr, c = nullptr;
    LtAlgorithm algorithm{};
  };
  using Shape = std::tuple<int32_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;
  bool open(const char* path);
  const Plan& plan(const Product&);
  void make(const Product&, Plan&);
  void destroy(Plan&);

  CublasLt lt_{};
  void* library_ = nullptr;
  LtHandle handle_ = nullptr;
  std::string description_;
  std::map<Shape, Plan> plans_;
};

// FFN for any number of tokens: linear_many, the activation, linear_many.
size_t ffn_scratch_bytes(const Ffn&);
void ffn_many(Stream, Gemm&, const Ffn&, void* scratch, size_t scratch_bytes);

}  // namespace pe::cuda
