#include "cuda/repack.h"

#include <cstring>

#include "core/status.h"
#include "cuda/tile.h"

namespace pe::cuda {

namespace {

int64_t tiles_of(const Packed& w) { return (w.cols + kTileColumns - 1) / kTileColumns; }
int64_t units_of(const Packed& w) {
  return is_float_format(w.format) ? 0 : w.format == PE_INT4_MIN ? 2 * kPanel : kPanel;
}

void check_format(const Packed& w) {
  if (!is_packed(w.format)) fail(PE_UNSUPPORTED, "a matrix of format %s in device memory", format_name(w.format));
}

// A 64-byte step of a panel holds a word a row. Past the last step: zeros of the format.
struct Steps {
  const uint8_t* data;
  int64_t count;
  uint32_t zero;
  uint32_t word(int64_t step, int row) const {
    if (step >= count) return zero;
    uint32_t w;
    std::memcpy(&w, data + step * 64 + 4 * row, 4);
    return w;
  }
};

void put(uint8_t* to, uint32_t word) { std::memcpy(to, &word, 4); }

// Eight steps of 8 columns; a word of the tile takes 4 columns of one step and the same 4 of the step 32 columns on.
void int4_tile(const Steps& in, int64_t k_tile, uint8_t* tile) {
  constexpr uint32_t kLow = 0x0f0f0f0f;
  for (int r = 0; r < kPanel; ++r) {
    for (int t = 0; t < 4; ++t) {
      const uint32_t first = in.word(8 * k_tile + t, r), second = in.word(8 * k_tile + 4 + t, r);
      put(tile + element_at(PE_INT4_MIN, r, 8 * t), (first & kLow) | (second & kLow) << 4);
      put(tile + element_at(PE_INT4_MIN, r, 8 * t + 4), (first >> 4 & kLow) | (second & ~kLow));
    }
  }
}

void int8_tile(const Steps& in, int64_t k_tile, uint8_t* tile) {
  for (int r = 0; r < kPanel; ++r)
    for (int c = 0; c < kTileColumns; c += 4)
      put(tile + element_at(PE_INT8, r, c), in.word((k_tile * kTileColumns + c) / 4, r));
}

// A word is one column of float32, or two of bfloat16.
void float_tile(const Steps& in, int32_t format, int64_t k_tile, uint8_t* tile) {
  const int columns = format == PE_F32 ? 1 : 2;
  for (int r = 0; r < kPanel; ++r)
    for (int c = 0; c < kTileColumns; c += columns)
      put(tile + element_at(format, r, c), in.word((k_tile * kTileColumns + c) / columns, r));
}

// Scale and minimum of a row and group, as 16 bits. Past the last group: zeros.
uint32_t number(const Packed& w, const uint8_t* panel, int64_t group, int r) {
  if (w.format == PE_INT4_MIN) {
    if (group >= w.groups) return 128u << 8;
    const auto minimum = static_cast<int8_t>(panel[w.minimum_offset + static_cast<size_t>(group * kPanel + r)]);
    const uint32_t scale = panel[w.scale_offset + static_cast<size_t>(group * kPanel + r)];
    return scale | static_cast<uint32_t>(minimum + 128) << 8;
  }
  int16_t scale = 0;
  if (group < w.groups)
    std::memcpy(&scale, panel + w.scale_offset + static_cast<size_t>(group * kPanel + r) * 2, sizeof scale);
  return static_cast<uint32_t>(scale + 32768);
}

void numbers(const Packed& w, const uint8_t* panel, int64_t k_tile, uint8_t* tile) {
  for (int c = 0; c < kTileColumns; c += sub_columns(w.group)) {
    const int64_t group = (k_tile * kTileColumns + c) / w.group;
    for (int g = 0; g < 8; ++g)
      put(tile + numbers_at(w.format, w.group, g, c), number(w, panel, group, g) | number(w, panel, group, g + 8)
                                                                                       << 16);
  }
}

}  // namespace

size_t repacked_bytes(const Packed& w) {
  check_format(w);
  return static_cast<size_t>(w.panels * tiles_of(w)) * tile_bytes(w.format, w.group);
}

size_t repacked_units(const Packed& w) {
  check_format(w);
  return static_cast<size_t>(w.panels * units_of(w));
}

void repack(const Packed& w, int64_t begin, int64_t end, uint8_t* tiles, float* units) {
  check_format(w);
  const uint32_t bytes = tile_bytes(w.format, w.group);
  const int64_t step = is_int4(w.format) ? 8 : w.format == PE_INT8 ? 4 : w.format == PE_BF16 ? 2 : 1;
  const uint32_t zero = w.format == PE_INT8 ? 0x80808080u : w.format == PE_INT4_SYM ? 0x88888888u : 0u;
  for (int64_t p = begin; p < end; ++p) {
    const uint8_t* panel = w.data + static_cast<size_t>(p) * w.panel_bytes;
    const Steps in{panel + w.data_offset, w.padded_cols / step, zero};
    if (units_of(w)) std::memcpy(units + p * units_of(w), panel, static_cast<size_t>(units_of(w)) * sizeof(float));
    for (int64_t k = 0; k < tiles_of(w); ++k) {
      uint8_t* tile = tiles + static_cast<size_t>(p * tiles_of(w) + k) * bytes;
      if (is_int4(w.format))
        int4_tile(in, k, tile);
      else if (w.format == PE_INT8)
        int8_tile(in, k, tile);
      else
        float_tile(in, w.format, k, tile);
      if (!is_float_format(w.format)) numbers(w, panel, k, tile);
    }
  }
}

Matrix matrix_view(const Packed& w, const uint8_t* tiles, const float* units) {
  check_format(w);
  Matrix m;
  m.tiles = tiles;
  m.units = units;
  m.format = w.format;
  m.group = w.group;
  m.rows = w.rows;
  m.cols = w.cols;
  m.panels = w.panels;
  m.k_tiles = tiles_of(w);
  m.tile_bytes = tile_bytes(w.format, w.group);
  return m;
}

}  // namespace pe::cuda
