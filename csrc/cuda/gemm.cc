#include "cuda/gemm.h"

#include <dlfcn.h>

#include "core/status.h"

namespace pe::cuda {

namespace {

void check_lt(LtStatus status, const char* what) {
  if (status) fail(PE_RESOURCE, "cuBLASLt: %s: status %d", what, status);
}

template <class F>
bool find(void* library, const char* name, F*& function, std::string& missing) {
  function = reinterpret_cast<F*>(dlsym(library, name));
  if (!function && missing.empty()) missing = name;
  return function != nullptr;
}

}  // namespace

Gemm::Gemm(const char* path) {
  const char* const names[] = {path ? path : "libcublasLt.so.13", path ? path : "libcublasLt.so.12"};
  for (const char* name : names)
    if (open(name)) return;
  description_ = "own kernels, 8 tokens at a time: " + description_;
}

bool Gemm::open(const char* path) {
  library_ = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);  // it has threads of its own
  if (!library_) {
    const char* error = dlerror();
    description_ = error ? error : path;
    return false;
  }
  std::string missing;
  bool all = true;
#define PE_FIND(name) all = find(library_, #name, lt_.name, missing) && all
  PE_FIND(cublasLtCreate);
  PE_FIND(cublasLtDestroy);
  PE_FIND(cublasLtGetVersion);
  PE_FIND(cublasLtMatmulDescCreate);
  PE_FIND(cublasLtMatmulDescDestroy);
  PE_FIND(cublasLtMatmulDescSetAttribute);
  PE_FIND(cublasLtMatrixLayoutCreate);
  PE_FIND(cublasLtMatrixLayoutDestroy);
  PE_FIND(cublasLtMatmulPreferenceCreate);
  PE_FIND(cublasLtMatmulPreferenceDestroy);
  PE_FIND(cublasLtMatmulPreferenceSetAttribute);
  PE_FIND(cublasLtMatmulAlgoGetHeuristic);
  PE_FIND(cublasLtMatmul);
#undef PE_FIND
  const LtStatus status = all ? lt_.cublasLtCreate(&handle_) : 0;
  if (all && !status) {
    const size_t v = lt_.cublasLtGetVersion();  // 12.8.4 is 120804, 13.0.2 is 130002
    description_ =
        "cuBLASLt " + std::to_string(v / 10000) + "." + std::to_string(v / 100 % 100) + "." + std::to_string(v % 100);
    return true;
  }
  description_ =
      std::string(path) + (all ? ": cublasLtCreate: status " + std::to_string(status) : ": lacks " + missing);
  handle_ = nullptr;
  dlclose(library_);
  library_ = nullptr;
  return false;
}

Gemm::~Gemm() {
  for (auto& [shape, plan] : plans_) destroy(plan);
  if (handle_) lt_.cublasLtDestroy(handle_);
  if (library_) dlclose(library_);
}

void Gemm::destroy(Plan& p) {
  for (LtLayout layout : {p.a, p.b, p.c})
    if (layout) lt_.cublasLtMatrixLayoutDestroy(layout);
  if (p.desc) lt_.cublasLtMatmulDescDestroy(p.desc);
}

// The library counts columns where we count rows: a row-major matrix is a column-major one transposed, so c^T = a . b^T
// is its product of a, transposed, and b.
void Gemm::make(const Product& x, Plan& p) {
  const auto m = static_cast<uint64_t>(x.m), n = static_cast<uint64_t>(x.n), k = static_cast<uint64_t>(x.k);
  check_lt(lt_.cublasLtMatmulDescCreate(&p.desc, kLtCompute32F, kLtFloat32), "product");
  check_lt(lt_.cublasLtMatmulDescSetAttribute(p.desc, kLtDescTransposeA, &kLtTransposed, sizeof kLtTransposed),
           "transposed operand");
  check_lt(lt_.cublasLtMatrixLayoutCreate(&p.a, x.type, k, m, x.a_stride), "weights");
  check_lt(lt_.cublasLtMatrixLayoutCreate(&p.b, x.type, k, n, x.b_stride), "activations");
  check_lt(lt_.cublasLtMatrixLayoutCreate(&p.c, kLtFloat32, m, n, x.c_stride), "output");
  struct Preference {
    const CublasLt& lt;
    LtPreference p = nullptr;
    ~Preference() {
      if (p) lt.cublasLtMatmulPreferenceDestroy(p);
    }
  } preference{lt_};
  check_lt(lt_.cublasLtMatmulPreferenceCreate(&preference.p), "preference");
  const uint64_t workspace = kWorkspaceBytes;
  check_lt(lt_.cublasLtMatmulPreferenceSetAttribute(preference.p, kLtPreferWorkspace, &workspace, sizeof workspace),
           "workspace");
  const uint32_t alignment = 16;
  for (const int32_t attribute : kLtPreferAlignment)
    check_lt(lt_.cublasLtMatmulPreferenceSetAttribute(preference.p, attribute, &alignment, sizeof alignment),
             "alignment");
  LtHeuristic best{};
  int found = 0;
  check_lt(lt_.cublasLtMatmulAlgoGetHeuristic(handle_, p.desc, p.a, p.b, p.c, p.c, preference.p, 1, &best, &found),
           "choice of an algorithm");
  if (found < 1)
    fail(PE_RESOURCE, "cuBLASLt has no algorithm for %lld x %lld x %lld", static_cast<long long>(x.m),
         static_cast<long long>(x.n), static_cast<long long>(x.k));
  p.algorithm = best.algorithm;
}

const Gemm::Plan& Gemm::plan(const Product& x) {
  const Shape shape{x.type, x.m, x.n, x.k, x.a_stride, x.b_stride, x.c_stride};
  const auto known = plans_.find(shape);
  if (known != plans_.end()) return known->second;
  Plan p;
  try {
    make(x, p);
    return plans_.emplace(shape, p).first->second;
  } catch (...) {
    destroy(p);
    throw;
  }
}

void Gemm::run(Stream stream, const Product& x, void* workspace) {
  const Plan& p = plan(x);
  const float beta = x.add ? 1.0f : 0.0f;
  check_lt(lt_.cublasLtMatmul(handle_, p.desc, &x.alpha, x.a, p.a, x.b, p.b, &beta, x.c, p.c, x.c, p.c, &p.algorithm,
                              workspace, kWorkspaceBytes, stream),
           "product");
}

}  // namespace pe::cuda
