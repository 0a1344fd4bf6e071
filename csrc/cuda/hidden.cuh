// What follows the first matrix of an FFN in the same block: the activation, and 64 intermediate columns as one
// finished group of int8.
#pragma once

#include "cuda/linear.cuh"
#include "cuda/math.cuh"
#include "cuda/quantize.cuh"

namespace pe::cuda {

// Panels of a group of 64 intermediate columns; gate and up alternate.
template <bool GATED>
constexpr int kHiddenPanels = kActGroup / kPanel * (GATED ? 2 : 1);

// A warp: the group of row `row`, from the sums that `multiply` left for token j. bias: of the block's first panel.
template <bool GATED>
__device__ __forceinline__ void write_hidden(const uint8_t* shared, int j, const float* bias, int activation,
                                             const Rows& hidden, int64_t row, int64_t group) {
  constexpr int R = kHiddenPanels<GATED>;
  float x[2];
  for (int i = 0; i < 2; ++i) {
    const int c = lane_id() + kWarp * i, p = c / kPanel * (GATED ? 2 : 1), r = c % kPanel;
    x[i] = 0.0f;
    if (group * kActGroup + c >= hidden.width) continue;
    float value = block_result<R>(shared, p, j, r), up = GATED ? block_result<R>(shared, p + 1, j, r) : 0.0f;
    if (bias) {
      value += bias[p * kPanel + r];
      if (GATED) up += bias[(p + 1) * kPanel + r];
    }
    x[i] = activate(activation, value);
    if (GATED) x[i] *= up;
  }
  if (hidden.quantized) return quantize_group(x[0], x[1], hidden.quant, row, group);
  for (int i = 0; i < 2; ++i) {
    const int64_t c = group * kActGroup + lane_id() + kWarp * i;
    if (c < hidden.width) hidden.f[row * hidden.stride + c] = x[i];
  }
}

}  // namespace pe::cuda
