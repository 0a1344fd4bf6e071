// cuBLASLt on the CPU, as far as csrc/cuda/cublaslt.h declares it: float32 and bfloat16 products with float32 sums,
// column-major, A transposed or not. A separate library, opened at run time like the real one; it reaches the emulated
// device through the head of the stream. Every description is checked, and the workspace is overwritten.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../emulated/hooks.h"

#define PE_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

enum Status { kSuccess = 0, kInvalidValue = 7, kExecutionFailed = 13, kNotSupported = 15 };
constexpr int32_t kFloat32 = 0, kBfloat16 = 14, kCompute32F = 68, kTransposed = 1;
constexpr int32_t kTransposeA = 3, kTransposeB = 4;        // attributes of a product
constexpr int32_t kMaxWorkspace = 1, kFirstAlignment = 5;  // of a preference; A, B, C, D
constexpr size_t kWorkspaceWanted = 4096;

struct Handle {
  uint32_t mark = 0x1ab1a5;
};
struct Product {
  int32_t transpose_a = 0, transpose_b = 0;
};
struct Layout {
  int32_t type;
  uint64_t rows, cols;
  int64_t stride;
};
struct Preference {
  uint64_t workspace = 0;
  uint32_t alignment[4] = {256, 256, 256, 256};
};
struct Algorithm {
  uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace_bytes;
  int32_t state;
  float waves;
  int32_t reserved[4];
};

uint64_t mixed(uint64_t h, uint64_t x) { return (h ^ x) * 0x100000001b3u + (h >> 29); }

// An algorithm carries the shapes it was chosen for, and alignments.
Algorithm algorithm_of(const Product& p, const Layout& a, const Layout& b, const Layout& d) {
  uint64_t h = 0xcbf29ce484222325u;
  for (const Layout* l : {&a, &b, &d})
    for (const uint64_t x : {static_cast<uint64_t>(l->type), l->rows, l->cols, static_cast<uint64_t>(l->stride)})
      h = mixed(h, x);
  h = mixed(h, static_cast<uint64_t>(p.transpose_a * 2 + p.transpose_b));
  return {{h}};
}

size_t element_bytes(const Layout& l) { return l.type == kBfloat16 ? 2 : 4; }
size_t bytes_of(const Layout& l) { return (static_cast<size_t>(l.stride) * (l.cols - 1) + l.rows) * element_bytes(l); }

float value(const void* base, const Layout& l, uint64_t row, uint64_t col) {
  const uint64_t i = row + col * static_cast<uint64_t>(l.stride);
  if (l.type == kFloat32) return static_cast<const float*>(base)[i];
  return std::bit_cast<float>(static_cast<uint32_t>(static_cast<const uint16_t*>(base)[i]) << 16);
}

bool consistent(const Product& p, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
  const auto rows = [](const Layout& l, int32_t t) { return t ? l.cols : l.rows; };
  const auto cols = [](const Layout& l, int32_t t) { return t ? l.rows : l.cols; };
  for (const Layout* l : {&a, &b, &c, &d})
    if (!l->rows || !l->cols || l->stride < static_cast<int64_t>(l->rows)) return false;
  return a.type == b.type && c.type == kFloat32 && d.type == kFloat32 && rows(a, p.transpose_a) == d.rows &&
         cols(b, p.transpose_b) == d.cols && cols(a, p.transpose_a) == rows(b, p.transpose_b) && c.rows == d.rows &&
         c.cols == d.cols;
}

// d = alpha * op(a) . op(b) + beta * c. Sums in float32 over pieces of 16 columns, as if of tensor cores.
void multiply(const Product& p, float alpha, const void* a, const Layout& la, const void* b, const Layout& lb,
              float beta, const float* c, const Layout& lc, float* d, const Layout& ld) {
  const uint64_t k = p.transpose_a ? la.rows : la.cols;
  std::vector<float> x(k), y(k * ld.cols);
  for (uint64_t j = 0; j < ld.cols; ++j)
    for (uint64_t i = 0; i < k; ++i) y[j * k + i] = p.transpose_b ? value(b, lb, j, i) : value(b, lb, i, j);
  for (uint64_t row = 0; row < ld.rows; ++row) {
    for (uint64_t i = 0; i < k; ++i) x[i] = p.transpose_a ? value(a, la, i, row) : value(a, la, row, i);
    for (uint64_t col = 0; col < ld.cols; ++col) {
      float sum = 0;
      for (uint64_t i = 0; i < k; i += 16) {
        double piece = sum;
        for (uint64_t e = i; e < std::min(k, i + 16); ++e) piece += static_cast<double>(x[e]) * y[col * k + e];
        sum = static_cast<float>(piece);
      }
      float result = alpha * sum;
      if (beta != 0) result += beta * c[row + col * static_cast<uint64_t>(lc.stride)];
      d[row + col * static_cast<uint64_t>(ld.stride)] = result;
    }
  }
}

template <class T, class... Arguments>
int32_t create(void** out, Arguments... arguments) {
  *out = new T{arguments...};
  return kSuccess;
}
template <class T>
int32_t destroy(void* p) {
  delete static_cast<T*>(p);
  return p ? kSuccess : kInvalidValue;
}

}  // namespace

PE_EXPORT size_t cublasLtGetVersion() { return 130000; }
PE_EXPORT int32_t cublasLtCreate(void** handle) { return create<Handle>(handle); }
PE_EXPORT int32_t cublasLtDestroy(void* handle) { return destroy<Handle>(handle); }

PE_EXPORT int32_t cublasLtMatmulDescCreate(void** desc, int32_t compute, int32_t scale) {
  return compute == kCompute32F && scale == kFloat32 ? create<Product>(desc) : kNotSupported;
}
PE_EXPORT int32_t cublasLtMatmulDescDestroy(void* desc) { return destroy<Product>(desc); }
PE_EXPORT int32_t cublasLtMatmulDescSetAttribute(void* desc, int32_t attribute, const void* value, size_t bytes) {
  if (!desc || !value || bytes != sizeof(int32_t)) return kInvalidValue;
  int32_t operation;
  memcpy(&operation, value, sizeof operation);
  if (operation != 0 && operation != kTransposed) return kNotSupported;
  if (attribute != kTransposeA && attribute != kTransposeB) return kNotSupported;
  auto* p = static_cast<Product*>(desc);
  (attribute == kTransposeA ? p->transpose_a : p->transpose_b) = operation;
  return kSuccess;
}

PE_EXPORT int32_t cublasLtMatrixLayoutCreate(void** layout, int32_t type, uint64_t rows, uint64_t cols,
                                             int64_t stride) {
  if (type != kFloat32 && type != kBfloat16) return kNotSupported;
  return create<Layout>(layout, type, rows, cols, stride);
}
PE_EXPORT int32_t cublasLtMatrixLayoutDestroy(void* layout) { return destroy<Layout>(layout); }

PE_EXPORT int32_t cublasLtMatmulPreferenceCreate(void** preference) { return create<Preference>(preference); }
PE_EXPORT int32_t cublasLtMatmulPreferenceDestroy(void* preference) { return destroy<Preference>(preference); }
PE_EXPORT int32_t cublasLtMatmulPreferenceSetAttribute(void* preference, int32_t attribute, const void* value,
                                                       size_t bytes) {
  auto* p = static_cast<Preference*>(preference);
  if (!p || !value) return kInvalidValue;
  if (attribute == kMaxWorkspace && bytes == sizeof p->workspace) {
    memcpy(&p->workspace, value, bytes);
  } else if (attribute >= kFirstAlignment && attribute < kFirstAlignment + 4 && bytes == sizeof(uint32_t)) {
    memcpy(&p->alignment[attribute - kFirstAlignment], value, bytes);
  } else {
    return kInvalidValue;
  }
  return kSuccess;
}

PE_EXPORT int32_t cublasLtMatmulAlgoGetHeuristic(void* handle, void* desc, void* a, void* b, void* c, void* d,
                                                 void* preference, int wanted, Heuristic* results, int* found) {
  if (!handle || !desc || !a || !b || !c || !d || !preference || !results || !found || wanted < 1) return kInvalidValue;
  const Layout &la = *static_cast<Layout*>(a), &lb = *static_cast<Layout*>(b), &ld = *static_cast<Layout*>(d);
  *found = 0;
  const auto& p = *static_cast<Product*>(desc);
  if (!consistent(p, la, lb, *static_cast<Layout*>(c), ld)) return kInvalidValue;
  const auto& wishes = *static_cast<Preference*>(preference);
  if (wishes.workspace < kWorkspaceWanted) return kNotSupported;
  results[0] = {};
  results[0].algorithm = algorithm_of(p, la, lb, ld);
  for (int i = 0; i < 4; ++i) results[0].algorithm.data[1 + i] = wishes.alignment[i];
  results[0].workspace_bytes = kWorkspaceWanted;
  *found = 1;
  return kSuccess;
}

PE_EXPORT int32_t cublasLtMatmul(void* handle, void* desc, const void* alpha, const void* a, void* layout_a,
                                 const void* b, void* layout_b, const void* beta, const void* c, void* layout_c,
                                 void* d, void* layout_d, const Algorithm* algorithm, void* workspace,
                                 size_t workspace_bytes, void* stream) {
  if (!handle || !desc || !alpha || !beta || !a || !b || !d || !algorithm || !stream) return kInvalidValue;
  const Product p = *static_cast<Product*>(desc);
  const Layout la = *static_cast<Layout*>(layout_a), lb = *static_cast<Layout*>(layout_b),
               lc = *static_cast<Layout*>(layout_c), ld = *static_cast<Layout*>(layout_d);
  if (!consistent(p, la, lb, lc, ld) || algorithm->data[0] != algorithm_of(p, la, lb, ld).data[0]) return kInvalidValue;
  if (!workspace || workspace_bytes < kWorkspaceWanted) return kInvalidValue;
  const void* const pointers[4] = {a, b, c, d};
  for (int i = 0; i < 4; ++i)
    if (reinterpret_cast<uintptr_t>(pointers[i]) % algorithm->data[1 + i]) return kInvalidValue;
  const auto* hooks = *static_cast<const cuda_emulation::StreamHooks* const*>(stream);
  if (!hooks->in_device_memory(a, bytes_of(la)) || !hooks->in_device_memory(b, bytes_of(lb)) ||
      !hooks->in_device_memory(d, bytes_of(ld)) || !hooks->in_device_memory(workspace, workspace_bytes))
    return kInvalidValue;
  float alpha_value, beta_value;
  memcpy(&alpha_value, alpha, sizeof(float));
  memcpy(&beta_value, beta, sizeof(float));
  if (beta_value != 0 && !hooks->in_device_memory(c, bytes_of(lc))) return kInvalidValue;
  const int refused = hooks->submit(stream, [=] {
    memset(workspace, 0xff, workspace_bytes);
    multiply(p, alpha_value, a, la, b, lb, beta_value, static_cast<const float*>(c), lc, static_cast<float*>(d), ld);
  });
  return refused ? kExecutionFailed : kSuccess;
}
