// What a thread can do at most with this ISA: loops that only read, only multiply int8, or only multiply floats.
// Reports show every figure beside them (docs/benchmarking.md).
#pragma once

namespace {

// Sum of the int32 in [p, p + bytes); bytes is a multiple of kProbeRead. One ascending stream, as a GEMV reads.
template <bool PREFETCH>
int32_t read_stream(const uint8_t* p, int64_t bytes) {
  constexpr int kLoads = kProbeRead / 64;
  I sum[kLoads];
  PE_UNROLL for (int i = 0; i < kLoads; ++i) sum[i] = simd::izero();
  for (int64_t k = 0; k < bytes; k += kProbeRead) {
    PE_UNROLL for (int i = 0; i < kLoads; ++i) {
      const uint8_t* at = p + k + i * 64;
      sum[i] = simd::iadd(sum[i], simd::iload(reinterpret_cast<const int32_t*>(at)));
      if (PREFETCH) simd::prefetch(at + 4096);
    }
  }
  I total = simd::izero();
  PE_UNROLL for (int i = 0; i < kLoads; ++i) total = simd::iadd(total, sum[i]);
  return reduce_add(total);
}

int32_t probe_read(const uint8_t* p, int64_t bytes, bool prefetch) {
  return prefetch ? read_stream<true>(p, bytes) : read_stream<false>(p, bytes);
}

// `rounds` (at most kProbeRounds) times kProbeSteps dot4, in as many independent chains as a GEMM tile has. Returns
// their sum: 0 only if nothing was done.
int32_t probe_int8(int64_t rounds) {
  constexpr int T = simd::kTile;
  int8_t a[4 * T];
  for (int i = 0; i < 4 * T; ++i) a[i] = static_cast<int8_t>(i + 1);
  uint8_t bytes[64];
  for (int i = 0; i < 64; ++i) bytes[i] = static_cast<uint8_t>(i % 16);
  simd::B w = simd::bload(bytes);
  I acc[T];
  PE_UNROLL for (int j = 0; j < T; ++j) acc[j] = simd::iset1(0);
  for (int64_t r = 0; r < rounds; ++r) {
    PE_UNROLL for (int s = 0; s < kProbeSteps / T; ++s) {
      simd::keep(w);
      PE_UNROLL for (int j = 0; j < T; ++j) acc[j] = simd::dot4_u4(acc[j], w, a + 4 * j);
    }
  }
  int32_t total = 0;
  for (int j = 0; j < T; ++j) total |= reduce_add(simd::shr<8>(acc[j]));
  return total;
}

// The same with fused multiply-adds of 16 floats. The chains run to 2; returns the largest.
float probe_f32(int64_t rounds) {
  constexpr int T = simd::kTile;
  F f[T];
  for (int j = 0; j < T; ++j) f[j] = simd::set1(static_cast<float>(j));
  F half = simd::set1(0.5f), one = simd::set1(1.0f);
  for (int64_t r = 0; r < rounds; ++r) {
    PE_UNROLL for (int s = 0; s < kProbeSteps / T; ++s) {
      simd::keep(half);
      PE_UNROLL for (int j = 0; j < T; ++j) f[j] = simd::fma(f[j], half, one);
    }
  }
  F most = f[0];
  for (int j = 1; j < T; ++j) most = simd::max(most, f[j]);
  return reduce_max(most);
}

}  // namespace
