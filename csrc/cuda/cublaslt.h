// The part of cuBLASLt that gemm.cu uses: declarations of our own, because the library is opened at run time and its
// headers need not be there when we build. Values and layouts as documented for cuBLASLt 12 and 13.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace pe::cuda {

using LtStatus = int32_t;  // 0: success
using LtHandle = void*;
using LtMatmulDesc = void*;
using LtLayout = void*;
using LtPreference = void*;

struct LtAlgorithm {
  uint64_t data[8];
};
struct LtHeuristic {
  LtAlgorithm algorithm;
  size_t workspace_bytes;
  LtStatus state;
  float waves;
  int32_t reserved[4];
};
static_assert(sizeof(LtHeuristic) == 96);

constexpr int32_t kLtFloat32 = 0, kLtBfloat16 = 14;      // cudaDataType
constexpr int32_t kLtCompute32F = 68;                    // CUBLAS_COMPUTE_32F
constexpr int32_t kLtTransposed = 1;                     // CUBLAS_OP_T
constexpr int32_t kLtDescTransposeA = 3;                 // CUBLASLT_MATMUL_DESC_TRANSA
constexpr int32_t kLtPreferWorkspace = 1;                // CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
constexpr int32_t kLtPreferAlignment[4] = {5, 6, 7, 8};  // CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_{A,B,C,D}_BYTES

// The functions, by their names in the library.
struct CublasLt {
  LtStatus (*cublasLtCreate)(LtHandle*);
  LtStatus (*cublasLtDestroy)(LtHandle);
  size_t (*cublasLtGetVersion)();
  LtStatus (*cublasLtMatmulDescCreate)(LtMatmulDesc*, int32_t compute, int32_t scale);
  LtStatus (*cublasLtMatmulDescDestroy)(LtMatmulDesc);
  LtStatus (*cublasLtMatmulDescSetAttribute)(LtMatmulDesc, int32_t attribute, const void*, size_t bytes);
  LtStatus (*cublasLtMatrixLayoutCreate)(LtLayout*, int32_t type, uint64_t rows, uint64_t cols, int64_t stride);
  LtStatus (*cublasLtMatrixLayoutDestroy)(LtLayout);
  LtStatus (*cublasLtMatmulPreferenceCreate)(LtPreference*);
  LtStatus (*cublasLtMatmulPreferenceDestroy)(LtPreference);
  LtStatus (*cublasLtMatmulPreferenceSetAttribute)(LtPreference, int32_t attribute, const void*, size_t bytes);
  LtStatus (*cublasLtMatmulAlgoGetHeuristic)(LtHandle, LtMatmulDesc, LtLayout a, LtLayout b, LtLayout c, LtLayout d,
                                             LtPreference, int wanted, LtHeuristic*, int* found);
  LtStatus (*cublasLtMatmul)(LtHandle, LtMatmulDesc, const void* alpha, const void* a, LtLayout, const void* b,
                             LtLayout, const void* beta, const void* c, LtLayout, void* d, LtLayout, const LtAlgorithm*,
                             void* workspace, size_t workspace_bytes, cudaStream_t);
};

}  // namespace pe::cuda
