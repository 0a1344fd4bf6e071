// Activations to int8, as the CPU does it (cpu/kernels/rows-inl.h; docs/packed_formats.md "Activations"): a warp a
// group of 64 columns, the same bytes and floats.
#pragma once

#include "cuda/device.h"

namespace pe::cuda {

__host__ __device__ constexpr int64_t groups_of(int64_t width) { return (width + kActGroup - 1) / kActGroup; }

// All lanes of a warp: lane l has columns l and l + 32 of the group, 0 past the row's width.
__device__ __forceinline__ void quantize_group(float x0, float x1, const QuantView& o, int64_t row, int64_t group) {
  const int lane = lane_id();
  constexpr float kSmallest = 0x1p-126f;  // the CPU flushes what is smaller
  if (fabsf(x0) < kSmallest) x0 = 0.0f;
  if (fabsf(x1) < kSmallest) x1 = 0.0f;
  float size0 = fabsf(x0), size1 = fabsf(x1);
  float max = warp_max(fmaxf(size0, size1));
  const float below = warp_max(fmaxf(size0 < max ? size0 : 0.0f, size1 < max ? size1 : 0.0f));
  const bool finite = size0 < __int_as_float(0x7f800000) && size1 < __int_as_float(0x7f800000);
  const bool all_finite = __all_sync(kAllLanes, finite);
  // the one value far above the rest of its group is kept apart, and the scale is the others'
  const unsigned top0 = __ballot_sync(kAllLanes, size0 == max), top1 = __ballot_sync(kAllLanes, size1 == max);
  const bool alone = max > kOutlierRatio * below && __popc(top0) + __popc(top1) == 1;
  const int column = alone ? (top0 ? __ffs(static_cast<int>(top0)) - 1 : __ffs(static_cast<int>(top1)) + 31) : -1;
  const int64_t g = row * o.groups + group;
  if (alone) {
    if (column == lane) o.outlier_value[g] = x0, x0 = 0.0f;
    if (column == lane + 32) o.outlier_value[g] = x1, x1 = 0.0f;
    max = below;
  }
  const float inverse = max > 0.0f ? 127.0f / max : 0.0f;
  const bool tiny = !(inverse < 3.0e38f);  // 127 / max overflows: such values count as 0
  const float by = tiny ? 0.0f : inverse;
  const int q0 = __float2int_rn(x0 * by), q1 = __float2int_rn(x1 * by);
  int8_t* q = o.q + row * o.q_stride + group * kActGroup;
  q[lane] = static_cast<int8_t>(q0);
  q[lane + 32] = static_cast<int8_t>(q1);
  int first = q0, second = q1;
  for (int step = kWarp / 2; step; step /= 2) {
    first += __shfl_xor_sync(kAllLanes, first, step);
    second += __shfl_xor_sync(kAllLanes, second, step);
  }
  if (lane != 0) return;
  const float scale = !all_finite ? __int_as_float(0x7fc00000) : tiny ? 0.0f : max / 127.0f;
  o.outlier_column[row * o.outlier_stride + group] = static_cast<uint8_t>(column + 1);
  o.scale[g] = scale;
  o.negative_sum32[2 * g] = -first;
  o.negative_sum32[2 * g + 1] = -second;
  o.negative_sum64[g] = -(first + second);
  o.scaled_sum32[2 * g] = scale * static_cast<float>(first);
  o.scaled_sum32[2 * g + 1] = scale * static_cast<float>(second);
  o.scaled_sum64[g] = scale * static_cast<float>(first + second);
}

// The columns from `group` on, of a row of so many, `x(column)` each.
template <class X>
__device__ __forceinline__ void quantize_group_of(X&& x, int64_t width, const QuantView& o, int64_t row,
                                                  int64_t group) {
  const int64_t c = group * kActGroup + lane_id();
  quantize_group(c < width ? x(c) : 0.0f, c + 32 < width ? x(c + 32) : 0.0f, o, row, group);
}

}  // namespace pe::cuda
