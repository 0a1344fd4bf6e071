// Single values out of tiles.
#pragma once

#include "cuda/device.h"
#include "cuda/tile.h"

namespace pe::cuda {

// The stored integer less its offset.
__device__ __forceinline__ int integer_of(int32_t format, const uint8_t* tile, int r, int c) {
  const int byte = tile[element_at(format, r, c)];
  if (format == PE_INT8) return byte - 128;
  const int q = c < 32 ? byte & 15 : byte >> 4;
  return format == PE_INT4_SYM ? q - 8 : q;
}

// Scale and minimum of row r at column c, in units of the row.
__device__ __forceinline__ void numbers_of(int32_t format, int32_t group, const uint8_t* tile, int r, int c, int& scale,
                                           int& minimum) {
  const uint32_t word = *reinterpret_cast<const uint32_t*>(tile + numbers_at(format, group, r, c));
  const int half = static_cast<int>(word >> (r / 8 * 16) & 0xffff);
  scale = format == PE_INT4_MIN ? half & 255 : half - 32768;
  minimum = format == PE_INT4_MIN ? (half >> 8) - 128 : 0;
}

// One value, as the CPU's gather_row gives it, bit for bit. row < rows, column < cols.
__device__ __forceinline__ float value_of(const Matrix& m, int64_t row, int64_t column) {
  const int64_t panel = row / kPanel;
  const int r = static_cast<int>(row % kPanel), c = static_cast<int>(column % kTileColumns);
  const uint8_t* tile = m.tiles + (panel * m.k_tiles + column / kTileColumns) * m.tile_bytes;
  const uint8_t* element = tile + element_at(m.format, r, c);
  if (m.format == PE_F32) return *reinterpret_cast<const float*>(element);
  if (m.format == PE_BF16) return from_bf16(*reinterpret_cast<const uint16_t*>(element));
  int scale, minimum;
  numbers_of(m.format, m.group, tile, r, c, scale, minimum);
  const auto q = static_cast<float>(integer_of(m.format, tile, r, c));
  const float* units = m.units + panel * (m.format == PE_INT4_MIN ? 2 * kPanel : kPanel) + r;
  const float step = static_cast<float>(scale) * units[0];
  return m.format == PE_INT4_MIN ? fmaf(step, q, static_cast<float>(minimum) * units[kPanel]) : step * q;
}

// Columns 8e .. 8e + 7 of row r of a tile, the values that value_of gives; units: those of the tile's panel.
__device__ __forceinline__ void eight_values(const Matrix& m, const uint8_t* tile, const float* units, int r, int e,
                                             float (&x)[8]) {
  if (m.format == PE_BF16) {
    const uint4 v = *reinterpret_cast<const uint4*>(tile + element_at(PE_BF16, r, 8 * e));
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    for (int i = 0; i < 8; ++i) x[i] = from_bf16(static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16)));
    return;
  }
  for (int half = 0; half < 2; ++half) {
    const int c = 8 * e + 4 * half;
    if (m.format == PE_F32) {
      const float4 v = *reinterpret_cast<const float4*>(tile + element_at(PE_F32, r, c));
      x[4 * half] = v.x, x[4 * half + 1] = v.y, x[4 * half + 2] = v.z, x[4 * half + 3] = v.w;
      continue;
    }
    uint32_t word = *reinterpret_cast<const uint32_t*>(tile + element_at(m.format, r, c));
    if (m.format != PE_INT8) word = (c < 32 ? word : word >> 4) & 0x0f0f0f0fu;
    const int offset = m.format == PE_INT8 ? 128 : m.format == PE_INT4_SYM ? 8 : 0;
    int scale, minimum;
    numbers_of(m.format, m.group, tile, r, c, scale, minimum);
    const float step = static_cast<float>(scale) * units[r];
    const float least = m.format == PE_INT4_MIN ? static_cast<float>(minimum) * units[kPanel + r] : 0.0f;
    for (int i = 0; i < 4; ++i) {
      const auto q = static_cast<float>(static_cast<int>(word >> (8 * i) & 255) - offset);
      x[4 * half + i] = m.format == PE_INT4_MIN ? fmaf(step, q, least) : step * q;
    }
  }
}

}  // namespace pe::cuda
