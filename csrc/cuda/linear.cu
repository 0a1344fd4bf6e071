// linear and head_linear: blocks of 1, 2 or 4 panels by chunks of 8 tokens (linear.cuh), so many that the chip is full.
#include "cuda/linear.cuh"

namespace pe::cuda {

namespace {

struct Product {
  Matrix weight;
  Rows in, out;
  const float* bias = nullptr;
  float factor = 0;
  int tokens = 0;
  int heads = 1;       // blockIdx.z: each with its own panels, input columns and output columns
  int64_t panels = 0;  // of a head
  int64_t in_head = 0, out_head = 0;
  int64_t columns = 0;  // of the output, of a head
};

// R panels of a head for a chunk of tokens.
template <int FORMAT, int SUB, int R>
__global__ void __launch_bounds__(kBlockThreads, 2) linear_kernel(Product a) {
  const int64_t head = blockIdx.z, first = static_cast<int64_t>(blockIdx.x) * R;
  const int panels = static_cast<int>(min(static_cast<int64_t>(R), a.panels - first));
  Tokens tokens;
  tokens.first = static_cast<int64_t>(blockIdx.y) * kFewTokens;
  tokens.count = static_cast<int>(min(static_cast<int64_t>(kFewTokens), a.tokens - tokens.first));
  a.in.f += head * a.in_head;
  uint8_t* shared = shared_memory();
  multiply<FORMAT, SUB, R>(a.weight, head * a.panels + first, panels, a.in, tokens, shared,
                           [] { wait_for_previous(); });
  const int wide = panels * kPanel;
  for (int i = static_cast<int>(threadIdx.x); i < tokens.count * wide; i += kBlockThreads) {
    const int j = i / wide, row = i % wide;
    const int64_t column = first * kPanel + row;
    if (column >= a.columns) continue;
    float value = block_result<R>(shared, row / kPanel, j, row % kPanel);
    if (a.bias) value += a.bias[column];
    float& out = a.out.f[(tokens.first + j) * a.out.stride + head * a.out_head + column];
    out = a.factor != 0.0f ? fmaf(value, a.factor, out) : value;
  }
}

template <int FORMAT, int SUB, int R>
void launch_product(Stream stream, const Product& a) {
  const size_t bytes = shared_bytes<FORMAT, SUB, R>(a.tokens < kFewTokens ? a.tokens : kFewTokens, a.weight.k_tiles);
  allow_shared(linear_kernel<FORMAT, SUB, R>, bytes);
  const dim3 grid(static_cast<unsigned>((a.panels + R - 1) / R), chunks_of(a.tokens), static_cast<unsigned>(a.heads));
  launch(stream, linear_kernel<FORMAT, SUB, R>, grid, dim3(kBlockThreads), bytes, a);
}

// The fewest panels a block that leave no more blocks than run at once on a large chip: all of them begin to load at
// once, and share the memory evenly. Past that, blocks of 4, which read the activations a quarter as often.
void launch_product(Stream stream, const Product& a) {
  constexpr int64_t kBlocksAtOnce = 4 * 132;
  const int64_t panels = a.panels * a.heads;
  with_format(a.weight, [&]<int FORMAT, int SUB>() {
    if (panels <= kBlocksAtOnce)
      launch_product<FORMAT, SUB, 1>(stream, a);
    else if (panels <= 2 * kBlocksAtOnce)
      launch_product<FORMAT, SUB, 2>(stream, a);
    else
      launch_product<FORMAT, SUB, 4>(stream, a);
  });
}

// What is left of every input head behind the weight's columns, rotated: a thread a column.
__global__ void __launch_bounds__(kBlockThreads)
    rotate_rest_kernel(Rows in, int64_t in_head, int64_t begin, int rest, const float* table, int rotary, Rows out,
                       int64_t out_head, int64_t to, const int32_t* positions) {
  wait_for_previous();
  let_next_start();
  const int64_t token = blockIdx.x, head = blockIdx.y;
  const float* x = in.f + token * in.stride + head * in_head + begin;
  float* y = out.f + token * out.stride + head * out_head + to;
  const int half = rotary / 2;
  const float* cos = table + int64_t{positions[token]} * rotary;
  for (int i = static_cast<int>(threadIdx.x); i < rest; i += static_cast<int>(blockDim.x)) {
    if (i < half)
      y[i] = fmaf(-x[half + i], cos[half + i], x[i] * cos[i]);
    else if (i < 2 * half)
      y[i] = fmaf(x[i - half], cos[i], x[i] * cos[i - half]);
    else
      y[i] = x[i];
  }
}

}  // namespace

void linear(Stream stream, const Linear& l) {
  if (l.tokens <= 0) return;
  check_activations(l.weight, l.in);
  Product a;
  a.weight = l.weight;
  a.in = l.in;
  a.out = l.out;
  a.bias = l.bias;
  a.factor = l.factor;
  a.tokens = l.tokens;
  a.panels = l.weight.panels;
  a.columns = l.weight.panels * kPanel;
  launch_product(stream, a);
}

void head_linear(Stream stream, const Matrix& weight, const Rows& in, int heads, int head_dim, const Rope* rope,
                 const Rows& out, const Step& step, int tokens) {
  if (tokens <= 0) return;
  if (!is_float_format(weight.format))
    fail(PE_UNSUPPORTED, "head_linear with a weight of format %s on CUDA; expected f32 or bf16",
         format_name(weight.format));
  check_activations(weight, in);
  const int64_t rest = head_dim - weight.cols;
  Product a;
  a.weight = weight;
  a.in = in;
  a.out = out;
  a.tokens = tokens;
  a.heads = heads;
  a.panels = weight.panels / heads;
  a.in_head = head_dim;
  a.out_head = out.width / heads;
  a.columns = a.out_head - rest;
  launch_product(stream, a);
  if (rest <= 0) return;
  if (!rope) fail(PE_INTERNAL, "head_linear leaves %lld columns but has no rope", static_cast<long long>(rest));
  const dim3 grid(static_cast<unsigned>(tokens), static_cast<unsigned>(heads));
  launch(stream, rotate_rest_kernel, grid, dim3(kWarp), 0, in, int64_t{head_dim}, weight.cols, static_cast<int>(rest),
         rope->values, rope->rotary_dim, out, a.out_head, a.columns, step.positions);
}

}  // namespace pe::cuda
