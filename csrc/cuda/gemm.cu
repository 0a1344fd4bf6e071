// linear for many tokens: a range of the weight's panels and the activations become bfloat16 (float32 for PE_F32) in
// scratch memory, row-major with whole tiles of columns, and cuBLASLt multiplies them into the output, sums in float32.
// dequantize is here too: the same conversion, into the tiles of a PE_F32 matrix.
#include "cuda/gemm.h"

#include <algorithm>

#include "cuda/device.h"
#include "cuda/quantize.cuh"
#include "cuda/tile.cuh"

namespace pe::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kWeightBytes = int64_t{64} << 20;  // of a range of panels
constexpr size_t kAligned = 256;

unsigned blocks_of(int64_t threads) { return static_cast<unsigned>((threads + kThreads - 1) / kThreads); }
dim3 rows_grid(int64_t rows, int64_t threads) { return {static_cast<unsigned>(rows), blocks_of(threads)}; }
dim3 tiles_grid(const Matrix& m, int64_t panels) {
  return {static_cast<unsigned>(panels), static_cast<unsigned>((m.k_tiles + 1) / 2)};
}

__device__ __forceinline__ uint32_t pair_bf16(float low, float high) {
  return to_bf16(low) | static_cast<uint32_t>(to_bf16(high)) << 16;
}
__device__ __forceinline__ void store_eight(uint16_t* to, const float (&x)[8]) {
  *reinterpret_cast<uint4*>(to) = {pair_bf16(x[0], x[1]), pair_bf16(x[2], x[3]), pair_bf16(x[4], x[5]),
                                   pair_bf16(x[6], x[7])};
}
__device__ __forceinline__ void store_eight(float* to, const float (&x)[8]) {
  reinterpret_cast<float4*>(to)[0] = {x[0], x[1], x[2], x[3]};
  reinterpret_cast<float4*>(to)[1] = {x[4], x[5], x[6], x[7]};
}

// A block two tiles of a panel, first or one behind it; a thread 8 columns of a row. Columns past K are 0. out:
// row-major, or tiles.
template <class T, bool TILES>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(Matrix m, int64_t first, T* out) {
  wait_for_previous();
  if (!TILES) let_next_start();
  const int r = static_cast<int>(threadIdx.x) / 16, e = static_cast<int>(threadIdx.x) % 8;
  const int64_t panel = first + blockIdx.x, k_tile = int64_t{blockIdx.y} * 2 + threadIdx.x % 16 / 8;
  const int64_t row = int64_t{blockIdx.x} * kPanel + r, piece = 8 * k_tile + e;
  if (k_tile >= m.k_tiles) return;
  const uint8_t* tile = m.tiles + (panel * m.k_tiles + k_tile) * m.tile_bytes;
  float x[8];
  eight_values(m, tile, m.units + panel * (m.format == PE_INT4_MIN ? 2 * kPanel : kPanel), r, e, x);
  for (int c = 0; c < 8; ++c)
    if (8 * piece + c >= m.cols) x[c] = 0.0f;
  if constexpr (TILES) {
    uint8_t* to = reinterpret_cast<uint8_t*>(out) + (panel * m.k_tiles + k_tile) * tile_bytes(PE_F32, 0);
    *reinterpret_cast<float4*>(to + element_at(PE_F32, r, 8 * e)) = {x[0], x[1], x[2], x[3]};
    *reinterpret_cast<float4*>(to + element_at(PE_F32, r, 8 * e + 4)) = {x[4], x[5], x[6], x[7]};
  } else {
    store_eight(out + row * m.k_tiles * kTileColumns + 8 * piece, x);
  }
}

// Rows of activations, a block each, as bfloat16, or copied; a thread 8 columns.
template <class T>
__global__ void __launch_bounds__(kThreads) activations_kernel(Rows in, int64_t cols, int64_t k_tiles, T* out) {
  wait_for_previous();
  let_next_start();
  const int64_t row = blockIdx.x, piece = int64_t{blockIdx.y} * kThreads + threadIdx.x;
  if (piece >= k_tiles * 8) return;
  float x[8];
  for (int c = 0; c < 8; ++c) x[c] = 0.0f;
  if (in.quantized) {
    const QuantView& v = in.quant;
    const int64_t group = piece / 8, g = row * v.groups + group;
    const int apart = v.outlier_column[row * v.outlier_stride + group] - 1 - static_cast<int>(piece % 8) * 8;
    for (int c = 0; c < 8; ++c) {
      if (8 * piece + c >= cols) break;
      x[c] = v.scale[g] * static_cast<float>(v.q[row * v.q_stride + 8 * piece + c]);
      if (c == apart) x[c] += v.outlier_value[g];
    }
  } else {
    for (int c = 0; c < 8; ++c)
      if (8 * piece + c < cols) x[c] = in.f[row * in.stride + 8 * piece + c];
  }
  store_eight(out + row * k_tiles * kTileColumns + 8 * piece, x);
}

__global__ void __launch_bounds__(kThreads)
    add_bias_kernel(const float* bias, float factor, int64_t columns, Rows out) {
  wait_for_previous();
  let_next_start();
  const int64_t c = int64_t{blockIdx.y} * kThreads + threadIdx.x;
  if (c >= columns) return;
  float& y = out.f[blockIdx.x * out.stride + c];
  y = fmaf(bias[c], factor, y);
}

// Behind a grid that writes weights: what follows may read weights before it waits for the grid in front, this one.
__global__ void fence_kernel() {}

size_t element_bytes(const Matrix& m) { return m.format == PE_F32 ? sizeof(float) : sizeof(uint16_t); }
int64_t padded_columns(const Matrix& m) { return m.k_tiles * kTileColumns; }

// Panels converted at a time.
int64_t panels_at_once(const Matrix& m) {
  const int64_t bytes = kPanel * padded_columns(m) * static_cast<int64_t>(element_bytes(m));
  return std::min(m.panels, std::max<int64_t>(1, kWeightBytes / bytes));
}

size_t weight_bytes(const Matrix& m) {
  return align_up(static_cast<size_t>(panels_at_once(m) * kPanel * padded_columns(m)) * element_bytes(m), kAligned);
}

template <class T>
void multiply_in_scratch(Stream stream, Gemm& gemm, const Linear& l, uint8_t* scratch) {
  const Matrix& m = l.weight;
  T* weights = reinterpret_cast<T*>(scratch + Gemm::kWorkspaceBytes);
  T* activations = reinterpret_cast<T*>(scratch + Gemm::kWorkspaceBytes + weight_bytes(m));
  const int64_t columns = padded_columns(m), at_once = panels_at_once(m);
  launch(stream, activations_kernel<T>, rows_grid(l.tokens, columns / 8), dim3(kThreads), 0, l.in, m.cols, m.k_tiles,
         activations);
  for (int64_t first = 0; first < m.panels; first += at_once) {
    const int64_t panels = std::min(at_once, m.panels - first);
    launch(stream, dequantize_kernel<T, false>, tiles_grid(m, panels), dim3(kThreads), 0, m, first, weights);
    Gemm::Product p;
    p.type = m.format == PE_F32 ? kLtFloat32 : kLtBfloat16;
    p.m = panels * kPanel;
    p.n = l.tokens;
    p.k = p.a_stride = p.b_stride = columns;
    p.c_stride = l.out.stride;
    p.a = weights;
    p.b = activations;
    p.c = l.out.f + first * kPanel;
    p.alpha = l.factor != 0.0f ? l.factor : 1.0f;
    p.add = l.factor != 0.0f;
    gemm.run(stream, p, scratch);
  }
  if (!l.bias) return;
  launch(stream, add_bias_kernel, rows_grid(l.tokens, m.panels * kPanel), dim3(kThreads), 0, l.bias,
         l.factor != 0.0f ? l.factor : 1.0f, m.panels * kPanel, l.out);
}

// Sums of gate and up, or of up alone, of an FFN.
Rows up_rows(const Ffn& f, float* values) {
  Rows rows;
  rows.f = values;
  rows.width = f.up.panels * kPanel;
  rows.stride = rows.width + kPanel;
  return rows;
}
size_t up_bytes(const Ffn& f) {
  return align_up(static_cast<size_t>(f.tokens * up_rows(f, nullptr).stride) * sizeof(float), kAligned);
}

}  // namespace

void dequantize(Stream stream, const Matrix& m, const Matrix& out) {
  if (out.format != PE_F32 || out.panels != m.panels || out.k_tiles != m.k_tiles)
    fail(PE_INTERNAL, "dequantize into a matrix of another shape or format");
  auto* to = reinterpret_cast<float*>(const_cast<uint8_t*>(out.tiles));
  launch(stream, dequantize_kernel<float, true>, tiles_grid(m, m.panels), dim3(kThreads), 0, m, int64_t{0}, to);
  launch_after(stream, fence_kernel, dim3(1), dim3(1), 0);
}

size_t gemm_scratch_bytes(const Matrix& m, int tokens) {
  const size_t activations = static_cast<size_t>(tokens * padded_columns(m)) * element_bytes(m);
  return Gemm::kWorkspaceBytes + weight_bytes(m) + align_up(activations, kAligned);
}

void linear_many(Stream stream, Gemm& gemm, const Linear& l, void* scratch, size_t scratch_bytes) {
  if (!gemm.takes(l.weight, l.tokens)) return linear(stream, l);
  if (l.in.quantized == is_float_format(l.weight.format))
    fail(PE_INTERNAL, "activations of a product with %s", format_name(l.weight.format));
  if (scratch_bytes < gemm_scratch_bytes(l.weight, l.tokens))
    fail(PE_INTERNAL, "scratch of %zu bytes for a product that takes %zu", scratch_bytes,
         gemm_scratch_bytes(l.weight, l.tokens));
  if (l.weight.format == PE_F32)
    multiply_in_scratch<float>(stream, gemm, l, static_cast<uint8_t*>(scratch));
  else
    multiply_in_scratch<uint16_t>(stream, gemm, l, static_cast<uint8_t*>(scratch));
}

size_t ffn_scratch_bytes(const Ffn& f) {
  return up_bytes(f) + std::max(gemm_scratch_bytes(f.up, f.tokens), gemm_scratch_bytes(f.down, f.tokens));
}

void ffn_many(Stream stream, Gemm& gemm, const Ffn& f, void* scratch, size_t scratch_bytes) {
  if (!gemm.takes(f.up, f.tokens) && !gemm.takes(f.down, f.tokens)) return ffn(stream, f);
  if (scratch_bytes < ffn_scratch_bytes(f))
    fail(PE_INTERNAL, "scratch of %zu bytes for an FFN that takes %zu", scratch_bytes, ffn_scratch_bytes(f));
  uint8_t* rest = static_cast<uint8_t*>(scratch) + up_bytes(f);
  Linear up;
  up.weight = f.up;
  up.in = f.in;
  up.out = up_rows(f, static_cast<float*>(scratch));
  up.bias = f.bias;
  up.tokens = f.tokens;
  linear_many(stream, gemm, up, rest, scratch_bytes - up_bytes(f));
  (f.gated ? act_mul : act)(stream, up.out, f.activation, f.hidden, f.tokens);
  linear_many(stream, gemm, f.second(), rest, scratch_bytes - up_bytes(f));
}

}  // namespace pe::cuda
