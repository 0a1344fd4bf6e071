// The avxvnni trait with the EVEX-encoded form of its one instruction, for CPUs that have AVX-512 but not AVX-VNNI, as
// Zen 4: the same source, lanes and order. Built only under PYENGINE_TEST_ISAS.
#define PE_DPBUSD_256 _mm256_dpbusd_epi32
#include "cpu/simd/avx2.h"

namespace {
namespace simd {
constexpr const char* kName = "avxvnni_evex";
}
}  // namespace

#include "cpu/kernels/table-inl.h"

PE_KERNEL_TABLE(kernels_avxvnni_evex)
