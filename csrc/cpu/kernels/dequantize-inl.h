// Panels of weights as float32 in memory: what the integer kernels avoid, for comparison with them.
#pragma once

namespace {

template <int FORMAT>
void dequantize_int(const Packed& w, int64_t panel, float* out) {
  const Scales<FORMAT> scales(w, panel);
  const uint8_t* data = w.data + panel * w.panel_bytes + w.data_offset;
  for (int64_t g = 0; g < w.groups; ++g) {
    const F scale = scales.scale(g), minimum = scales.minimum(g);
    const int64_t end = imin64((g + 1) * w.group, w.cols);
    for (int64_t k = g * w.group; k < end; ++k) {
      const F q = simd::to_float(weight_column<FORMAT>(data, k));
      simd::store(out + k * kPanel, Weights<FORMAT>::kMinimum ? simd::fma(scale, q, minimum) : simd::mul(scale, q));
    }
  }
}

// One panel, not of PE_F32, as a panel of PE_F32: [cols][16]. The values are gather_row's, bit for bit.
void dequantize(const Packed* weight, int64_t panel, float* out) {
  const Packed& w = *weight;
  switch (w.format) {
    case PE_INT8: return dequantize_int<PE_INT8>(w, panel, out);
    case PE_INT4_SYM: return dequantize_int<PE_INT4_SYM>(w, panel, out);
    case PE_INT4_MIN: return dequantize_int<PE_INT4_MIN>(w, panel, out);
    default: break;
  }
  const int32_t* pairs = reinterpret_cast<const int32_t*>(w.data + panel * w.panel_bytes + w.data_offset);
  for (int64_t k = 0; k < w.cols; ++k) {  // bfloat16: two columns in a word
    const I pair = simd::iload(pairs + k / 2 * kPanel);
    simd::store(out + k * kPanel, simd::as_float(k % 2 ? simd::iand(pair, simd::iset1(-65536)) : simd::shl<16>(pair)));
  }
}

}  // namespace
