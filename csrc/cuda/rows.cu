// Ops on rows: a block a row where a row is summed over, else a thread an element. Block sizes follow from the width
// alone and sums have one fixed tree, so a row's bits do not depend on how many there are.
#include "cuda/math.cuh"
#include "cuda/quantize.cuh"
#include "cuda/tile.cuh"

namespace pe::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kMaxRowWarps = 16;  // of a block that sums over a row

// A warp a group of 64 columns, up to 16.
dim3 row_block(int64_t width) {
  const int64_t groups = groups_of(width);
  return dim3(static_cast<unsigned>(kWarp * (groups < kMaxRowWarps ? groups : kMaxRowWarps)));
}

// Rows by so many threads of each.
dim3 grid_of(int count, int64_t threads) {
  return dim3(static_cast<unsigned>(count), static_cast<unsigned>((threads + kThreads - 1) / kThreads));
}

__device__ __forceinline__ int64_t row_index() { return blockIdx.x; }
__device__ __forceinline__ int64_t column_index() {
  return static_cast<int64_t>(blockIdx.y) * kThreads + static_cast<int64_t>(threadIdx.x);
}

// ---- norms ----------------------------------------------------------------------------------------------------------

struct NormRows {
  Rows in, out;
  Norm norm;
  float scale = 0;  // of what is added to out
  const int32_t* rows = nullptr;
};

enum class To { kFloat, kQuantized, kResidual };

// Warp w has the groups of 64 columns w, w + warps ..., a lane two columns of each. KEPT groups a warp are in
// registers, the weights from before the wait on; KEPT 0: rows that are too wide for that are read again and again.
template <To TO, int KEPT>
__global__ void __launch_bounds__(kWarp* kMaxRowWarps) norm_kernel(NormRows a) {
  const int64_t row = row_index(), width = a.in.width, warps = blockDim.x / kWarp;
  const int n = KEPT ? 2 * KEPT : static_cast<int>(2 * ((groups_of(width) + warps - 1) / warps));
  const auto column = [&](int i) { return (warp_id() + warps * (i / 2)) * kActGroup + lane_id() + i % 2 * kWarp; };
  const auto of = [&](const float* values, int i) { return column(i) < width ? values[column(i)] : 0.0f; };
  float kept[KEPT ? 2 * KEPT : 1], kept_weight[KEPT ? 2 * KEPT : 1];
#pragma unroll
  for (int i = 0; KEPT && i < n; ++i) kept_weight[i] = of(a.norm.weight, i);
  wait_for_previous();
  let_next_start();
  const float* x = a.in.f + (a.rows ? a.rows[row] : row) * a.in.stride;
#pragma unroll
  for (int i = 0; KEPT && i < n; ++i) kept[i] = of(x, i);
  const auto at = [&](int i) { return KEPT ? kept[i] : of(x, i); };

  float mean = 0.0f, sum = 0.0f;
  if (a.norm.kind == PE_LAYER_NORM) {
#pragma unroll
    for (int i = 0; i < n; ++i) sum += at(i);
    mean = block_sum(sum) / static_cast<float>(width);
    sum = 0.0f;
  }
#pragma unroll
  for (int i = 0; i < n; ++i)
    if (column(i) < width) sum = fmaf(at(i) - mean, at(i) - mean, sum);
  const float inverse = 1.0f / sqrtf(block_sum(sum) / static_cast<float>(width) + a.norm.eps);
  const auto value = [&](int i) {
    const float v = (at(i) - mean) * inverse, w = KEPT ? kept_weight[i] : of(a.norm.weight, i);
    return a.norm.bias ? fmaf(v, w, of(a.norm.bias, i)) : v * w;
  };
  float* y = a.out.f + row * a.out.stride;
#pragma unroll
  for (int i = 0; i < n; i += 2) {
    if (column(i) - lane_id() >= width) break;  // the warp's groups are done
    const float values[2] = {column(i) < width ? value(i) : 0.0f, column(i + 1) < width ? value(i + 1) : 0.0f};
    if constexpr (TO == To::kQuantized) {
      quantize_group(values[0], values[1], a.out.quant, row, column(i) / kActGroup);
    } else {
      for (int half = 0; half < 2; ++half) {
        const int64_t c = column(i + half);
        if (c < width) y[c] = TO == To::kResidual ? fmaf(values[half], a.scale, y[c]) : values[half];
      }
    }
  }
}

template <To TO>
void launch_norm(Stream stream, const NormRows& a, int count) {
  if (count <= 0) return;
  const dim3 grid(static_cast<unsigned>(count)), block = row_block(a.in.width);
  const int64_t each = (groups_of(a.in.width) + kMaxRowWarps - 1) / kMaxRowWarps;  // groups of a warp
  if (each <= 1) return launch(stream, norm_kernel<TO, 1>, grid, block, 0, a);
  if (each <= 4) return launch(stream, norm_kernel<TO, 4>, grid, block, 0, a);
  if (each <= 8) return launch(stream, norm_kernel<TO, 8>, grid, block, 0, a);
  launch(stream, norm_kernel<TO, 0>, grid, block, 0, a);
}

// ---- embeddings -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ float table_value(const Table& t, int64_t row, int64_t c) {
  const int64_t at = row * t.cols + c;
  if (t.format == PE_ROWS_F32) return static_cast<const float*>(t.data)[at];
  if (t.format == PE_ROWS_BF16) return from_bf16(static_cast<const uint16_t*>(t.data)[at]);
  return value_of(t.matrix, row, c);
}

__global__ void __launch_bounds__(kThreads)
    embed_kernel(Table table, Table of_positions, float scale, Rows out, const int32_t* ids, const int32_t* positions) {
  wait_for_previous();
  let_next_start();
  const int64_t t = row_index(), c = column_index();
  if (c >= out.width) return;
  float x = table_value(table, ids[t], c);
  if (scale != 1.0f) x *= scale;
  if (of_positions.cols) x += table_value(of_positions, positions[t], c);
  out.f[t * out.stride + c] = x;
}

// ---- elements -------------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads) quantize_kernel(Rows in, Rows out) {
  wait_for_previous();
  let_next_start();
  const int64_t row = row_index(), group = column_index() / kWarp;
  if (group >= groups_of(in.width)) return;
  const float* x = in.f + row * in.stride;
  quantize_group_of([x](int64_t c) { return x[c]; }, in.width, out.quant, row, group);
}

__global__ void __launch_bounds__(kThreads) add_kernel(Rows in, float scale, Rows out) {
  wait_for_previous();
  let_next_start();
  const int64_t row = row_index(), c = column_index();
  if (c >= in.width) return;
  float& y = out.f[row * out.stride + c];
  y = fmaf(in.f[row * in.stride + c], scale, y);
}

// act(gate) * up of column c; gate and up are interleaved by 16.
__device__ __forceinline__ float gated(int activation, const float* x, int64_t c) {
  const int64_t at = c / kPanel * 2 * kPanel + c % kPanel;
  return activate(activation, x[at]) * x[at + kPanel];
}

__global__ void __launch_bounds__(kThreads) act_mul_kernel(Rows in, int activation, Rows out) {
  wait_for_previous();
  let_next_start();
  const int64_t row = row_index(), c = column_index();
  const float* x = in.f + row * in.stride;
  if (out.quantized) {
    const int64_t group = c / kWarp;
    if (group < groups_of(out.width))
      quantize_group_of([&](int64_t i) { return gated(activation, x, i); }, out.width, out.quant, row, group);
  } else if (c < in.width / 2) {
    out.f[row * out.stride + c] = gated(activation, x, c);
  }
}

__global__ void __launch_bounds__(kThreads) act_kernel(Rows in, int activation, Rows out) {
  wait_for_previous();
  let_next_start();
  const int64_t row = row_index(), c = column_index();
  const float* x = in.f + row * in.stride;
  if (out.quantized) {
    const int64_t group = c / kWarp;
    if (group < groups_of(out.width))
      quantize_group_of([&](int64_t i) { return activate(activation, x[i]); }, out.width, out.quant, row, group);
  } else if (c < in.width) {
    out.f[row * out.stride + c] = activate(activation, x[c]);
  }
}

__global__ void __launch_bounds__(kThreads) mask_kernel(const float* mask, Rows out) {
  wait_for_previous();
  let_next_start();
  const int64_t c = column_index();
  if (c < out.width && mask[c] == 0.0f) out.f[row_index() * out.stride + c] = 0.0f;
}

__global__ void __launch_bounds__(kThreads) tap_kernel(Rows in, const int32_t* place, float* out) {
  wait_for_previous();
  let_next_start();
  const int64_t row = row_index(), c = column_index();
  if (c < in.width) out[row * in.width + c] = in.f[(place ? place[row] : row) * in.stride + c];
}

__global__ void __launch_bounds__(kThreads) load_kernel(const float* from, Rows out) {
  wait_for_previous();
  let_next_start();
  const int64_t row = row_index(), c = column_index();
  if (c < out.width) out.f[row * out.stride + c] = from[row * out.width + c];
}

// out *= sigmoid(in . weight)
__global__ void __launch_bounds__(kWarp* kMaxRowWarps) gate_kernel(Rows in, const float* weight, Rows out) {
  wait_for_previous();
  let_next_start();
  const float* x = in.f + row_index() * in.stride;
  float sum = 0.0f;
  for (int64_t c = threadIdx.x; c < in.width; c += blockDim.x) sum = fmaf(x[c], weight[c], sum);
  const float by = sigmoid(block_sum(sum));
  float* y = out.f + row_index() * out.stride;
  for (int64_t c = threadIdx.x; c < out.width; c += blockDim.x) y[c] *= by;
}

void require_activation(int activation) {
  if (activation < PE_SILU || activation > PE_RELU) fail(PE_REQUEST, "activation %d is unknown", activation);
}

void require_table(const Table& t) {
  if (t.format != PE_ROWS_F32 && t.format != PE_ROWS_BF16 && t.format != t.matrix.format)
    fail(PE_UNSUPPORTED, "an embedding of format %d on a CUDA device", t.format);
}

}  // namespace

void embed(Stream stream, const Table& table, const Table* of_positions, float scale, const Rows& out, const Step& step,
           int tokens) {
  const Table positions = of_positions ? *of_positions : Table{};
  require_table(table);
  if (of_positions) require_table(positions);
  if (tokens > 0)
    launch(stream, embed_kernel, grid_of(tokens, out.width), kThreads, 0, table, positions, scale, out, step.token_ids,
           step.positions);
}

void norm(Stream stream, const Rows& in, const Norm& n, const Rows& out, int count, const int32_t* rows) {
  const NormRows a{in, out, n, 0.0f, rows};
  if (out.quantized)
    launch_norm<To::kQuantized>(stream, a, count);
  else
    launch_norm<To::kFloat>(stream, a, count);
}

void norm_residual(Stream stream, const Rows& in, const Norm& n, float scale, const Rows& out, int count) {
  launch_norm<To::kResidual>(stream, {in, out, n, scale, nullptr}, count);
}

void quantize(Stream stream, const Rows& in, const Rows& out, int count) {
  if (count > 0) launch(stream, quantize_kernel, grid_of(count, groups_of(in.width) * kWarp), kThreads, 0, in, out);
}

void add(Stream stream, const Rows& in, float scale, const Rows& out, int count) {
  if (count > 0) launch(stream, add_kernel, grid_of(count, in.width), kThreads, 0, in, scale, out);
}

void act_mul(Stream stream, const Rows& in, int activation, const Rows& out, int count) {
  require_activation(activation);
  const int64_t threads = out.quantized ? groups_of(out.width) * kWarp : in.width / 2;
  if (count > 0) launch(stream, act_mul_kernel, grid_of(count, threads), kThreads, 0, in, activation, out);
}

void act(Stream stream, const Rows& in, int activation, const Rows& out, int count) {
  require_activation(activation);
  const int64_t threads = out.quantized ? groups_of(out.width) * kWarp : in.width;
  if (count > 0) launch(stream, act_kernel, grid_of(count, threads), kThreads, 0, in, activation, out);
}

void mask_columns(Stream stream, const float* mask, const Rows& out, int count) {
  if (count > 0) launch(stream, mask_kernel, grid_of(count, out.width), kThreads, 0, mask, out);
}

void gate(Stream stream, const Rows& in, const float* weight, const Rows& out, int count) {
  if (count > 0) launch(stream, gate_kernel, static_cast<unsigned>(count), row_block(in.width), 0, in, weight, out);
}

void load(Stream stream, const float* from, const Rows& out, int count) {
  if (count > 0) launch(stream, load_kernel, grid_of(count, out.width), kThreads, 0, from, out);
}

void tap(Stream stream, const Rows& in, const int32_t* place, float* out, int count) {
  if (count > 0) launch(stream, tap_kernel, grid_of(count, in.width), kThreads, 0, in, place, out);
}

}  // namespace pe::cuda
