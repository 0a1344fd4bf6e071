// AMX tiles in plain C++ (Intel SDM volume 2: LDTILECFG, TILELOADD, TDPBSUD, TILESTORED), in place of the instructions
// in avx512vnni_amx.h, which includes this inside its namespace.

constexpr const char* kName = "avx512vnni_amx_emulated";

struct Tiles {
  TileConfig config;
  bool configured;
  uint8_t data[8][16][64];
};
thread_local Tiles tiles;

// What the CPU would raise as #UD or #GP ends the test.
inline void expect(bool holds) {
  if (!holds) __builtin_trap();
}

inline void tile_configure(const TileConfig& config) {
  for (int i = 0; i < 8; ++i) {
    expect(config.rows[i] <= 16 && config.row_bytes[i] <= 64);
    expect((config.rows[i] == 0) == (config.row_bytes[i] == 0));
  }
  for (int i = 8; i < 16; ++i) expect(config.rows[i] == 0 && config.row_bytes[i] == 0);
  expect(config.palette == 1 && config.start_row == 0);
  tiles.config = config;
  tiles.configured = true;
  __builtin_memset(tiles.data, 0, sizeof tiles.data);
}
inline void tile_release() { tiles.configured = false; }

template <int N>
inline void tile_zero() {
  expect(tiles.configured && tiles.config.rows[N] > 0);
  __builtin_memset(tiles.data[N], 0, sizeof tiles.data[N]);
}
template <int N>
inline void tile_load(const void* p, int64_t stride) {
  tile_zero<N>();
  for (int r = 0; r < tiles.config.rows[N]; ++r)
    __builtin_memcpy(tiles.data[N][r], static_cast<const uint8_t*>(p) + r * stride, tiles.config.row_bytes[N]);
}
template <int N>
inline void tile_store(void* p, int64_t stride) {
  expect(tiles.configured && tiles.config.rows[N] > 0);
  for (int r = 0; r < tiles.config.rows[N]; ++r)
    __builtin_memcpy(static_cast<uint8_t*>(p) + r * stride, tiles.data[N][r], tiles.config.row_bytes[N]);
}
template <int C, int A, int B>
inline void tile_dot() {
  const TileConfig& c = tiles.config;
  expect(tiles.configured && c.rows[A] == c.rows[C] && c.row_bytes[B] == c.row_bytes[C]);
  expect(c.row_bytes[A] % 4 == 0 && c.row_bytes[C] % 4 == 0 && c.rows[B] == c.row_bytes[A] / 4);
  for (int m = 0; m < c.rows[C]; ++m)
    for (int n = 0; n < c.row_bytes[C] / 4; ++n) {
      int32_t sum;
      __builtin_memcpy(&sum, tiles.data[C][m] + 4 * n, 4);
      for (int k = 0; k < c.row_bytes[A] / 4; ++k)
        for (int j = 0; j < 4; ++j)
          sum += static_cast<int8_t>(tiles.data[A][m][4 * k + j]) * tiles.data[B][k][4 * n + j];
      __builtin_memcpy(tiles.data[C][m] + 4 * n, &sum, 4);
    }
}
