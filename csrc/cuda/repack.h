// From the CPU's panels (docs/packed_formats.md) to the tiles of device memory (tile.h). Host code without CUDA calls.
#pragma once

#include "cuda/kernels.h"

namespace pe::cuda {

size_t repacked_bytes(const Packed&);  // of the tiles
size_t repacked_units(const Packed&);  // floats of Matrix::units; 0 for float formats
// Panels begin .. end - 1, into their places behind `tiles` and `units`, which are those of panel 0. Ranges of panels
// are independent: threads can share a tensor.
void repack(const Packed&, int64_t begin, int64_t end, uint8_t* tiles, float* units);
// The matrix whose tiles and units were copied there. tiles: aligned to 16 bytes.
Matrix matrix_view(const Packed&, const uint8_t* tiles, const float* units);

}  // namespace pe::cuda
