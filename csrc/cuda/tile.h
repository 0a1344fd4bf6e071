// A tile of a packed weight in device memory: 16 rows (a panel) x 64 columns. Data in the order in which lanes of a
// warp take it, 16 bytes each; then, for integers, a word of 16 + 16 bits per row pair (g, g + 8) and sub-block of
// columns.
//
// With g = r % 8, h = r / 8, t = c % 32 / 8, piece = c % 8 / 4, m = c / 32 (the operand of mma_u8s8 number m, whose
// columns stand permuted so that a lane's activations are 8 neighbours):
//   int4  512 bytes: lane 4g + t, word 2 piece + h, byte c % 4, low half for m = 0, high half for m = 1; 0..15
//   int8  1024 bytes: the same at 512 m, a byte each; q + 128
//   bf16  2048 bytes: piece of 512 for 16 columns, lane r + 16 (c % 16 / 8), element c % 8
//   f32   4096 bytes: piece of 512 for 8 columns, lane r + 16 (c % 8 / 4), element c % 4
// Numbers: [g][sub-block]: for h = 0, 1: int16 scale + 32768; PE_INT4_MIN: uint8 scale, int8 minimum + 128. A sub-block
// is 32 columns where the group is, else 64; groups of 128 repeat theirs in each of two tiles.
#pragma once

#include <cuda_runtime.h>

#include "cuda/kernels.h"

namespace pe::cuda {

__host__ __device__ constexpr bool is_float_format(int32_t format) { return format == PE_F32 || format == PE_BF16; }
__host__ __device__ constexpr bool is_int4(int32_t format) { return format == PE_INT4_SYM || format == PE_INT4_MIN; }

// Columns of a sub-block; 64 for floats, which have none.
__host__ __device__ constexpr int sub_columns(int32_t group) { return group == 32 ? 32 : kTileColumns; }

__host__ __device__ constexpr uint32_t data_bytes(int32_t format) {  // of a tile
  return is_int4(format) ? 512 : format == PE_INT8 ? 1024 : format == PE_BF16 ? 2048 : 4096;
}

__host__ __device__ constexpr uint32_t tile_bytes(int32_t format, int32_t group) {
  return data_bytes(format) + (is_float_format(format) ? 0u : 8u * 4u * (kTileColumns / sub_columns(group)));
}

// Where the word of row pair r % 8 and column c of a tile is.
__host__ __device__ constexpr uint32_t numbers_at(int32_t format, int32_t group, int r, int c) {
  const int subs = kTileColumns / sub_columns(group);
  return data_bytes(format) + 4u * static_cast<uint32_t>(r % 8 * subs + c / sub_columns(group));
}

// Where the element of row r and column c is; int4: the byte that holds it.
__host__ __device__ constexpr uint32_t element_at(int32_t format, int r, int c) {
  if (format == PE_F32) return static_cast<uint32_t>(c / 8 * 512 + (r + c % 8 / 4 * 16) * 16 + c % 4 * 4);
  if (format == PE_BF16) return static_cast<uint32_t>(c / 16 * 512 + (r + c % 16 / 8 * 16) * 16 + c % 8 * 2);
  const int lane = 4 * (r % 8) + c % 32 / 8, word = c % 8 / 4 * 2 + r / 8;
  return static_cast<uint32_t>((format == PE_INT8 ? c / 32 * 512 : 0) + lane * 16 + word * 4 + c % 4);
}

}  // namespace pe::cuda
