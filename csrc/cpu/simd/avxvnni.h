// The 16-lane trait for AVX2 with AVX-VNNI, the VEX-encoded vpdpbusd of CPUs without AVX-512 (from Alder Lake on).
#pragma once

#define PE_DPBUSD_256 _mm256_dpbusd_avx_epi32
#include "cpu/simd/avx2.h"

namespace {
namespace simd {
constexpr const char* kName = "avxvnni";
}
}  // namespace
