// The FFN of up to 8 tokens in two kernels: a block computes 64 intermediate columns (8 panels where gate and up
// alternate, else 4), applies the activation and writes them as one finished group of int8; then down is a linear.
#include "cuda/linear.cuh"
#include "cuda/math.cuh"
#include "cuda/quantize.cuh"

namespace pe::cuda {

namespace {

struct Up {
  Matrix weight;
  Rows in, hidden;
  const float* bias = nullptr;
  int activation = 0, tokens = 0;
};

// Column c of the block's 64 for token j.
template <bool GATED, int R>
__device__ __forceinline__ float hidden_value(const Up& a, const uint8_t* shared, int64_t first, int j, int c) {
  const int p = c / kPanel * (GATED ? 2 : 1), r = c % kPanel;
  const float* bias = a.bias ? a.bias + (first + p) * kPanel + r : nullptr;
  float x = block_result<R>(shared, p, j, r);
  if (bias) x += bias[0];
  x = activate(a.activation, x);
  if (!GATED) return x;
  float up = block_result<R>(shared, p + 1, j, r);
  if (bias) up += bias[kPanel];
  return x * up;
}

template <int FORMAT, int SUB, bool GATED>
__global__ void __launch_bounds__(kBlockThreads, 2) ffn_up_kernel(Up a) {
  constexpr int R = kActGroup / kPanel * (GATED ? 2 : 1);
  const int64_t group = blockIdx.x, first = group * R, width = a.hidden.width;
  const int panels = static_cast<int>(min(static_cast<int64_t>(R), a.weight.panels - first));
  Tokens tokens;
  tokens.first = static_cast<int64_t>(blockIdx.y) * kFewTokens;
  tokens.count = static_cast<int>(min(static_cast<int64_t>(kFewTokens), a.tokens - tokens.first));
  uint8_t* shared = shared_memory();
  multiply<FORMAT, SUB, R>(a.weight, first, panels, a.in, tokens, shared, [] { wait_for_previous(); });
  const int j = warp_id();  // a warp a token
  if (j >= tokens.count) return;
  const int64_t row = tokens.first + j, column = group * kActGroup;
  float x[2];
  for (int i = 0; i < 2; ++i) {
    const int c = lane_id() + kWarp * i;
    x[i] = column + c < width ? hidden_value<GATED, R>(a, shared, first, j, c) : 0.0f;
  }
  if (a.hidden.quantized) return quantize_group(x[0], x[1], a.hidden.quant, row, group);
  for (int i = 0; i < 2; ++i) {
    const int64_t c = column + lane_id() + kWarp * i;
    if (c < width) a.hidden.f[row * a.hidden.stride + c] = x[i];
  }
}

template <int FORMAT, int SUB, bool GATED>
void launch_up(Stream stream, const Up& a) {
  constexpr int R = kActGroup / kPanel * (GATED ? 2 : 1);
  const size_t bytes = shared_bytes<FORMAT, SUB, R>(a.tokens < kFewTokens ? a.tokens : kFewTokens);
  allow_shared(ffn_up_kernel<FORMAT, SUB, GATED>, bytes);
  const dim3 grid(static_cast<unsigned>((a.weight.panels + R - 1) / R), chunks_of(a.tokens));
  launch(stream, ffn_up_kernel<FORMAT, SUB, GATED>, grid, dim3(kBlockThreads), bytes, a);
}

}  // namespace

void ffn(Stream stream, const Ffn& f) {
  if (f.tokens <= 0) return;
  check_activations(f.up, f.in);
  check_activations(f.down, f.hidden);
  Up a;
  a.weight = f.up;
  a.in = f.in;
  a.hidden = f.hidden;
  a.bias = f.bias;
  a.activation = f.activation;
  a.tokens = f.tokens;
  with_format(f.up, [&]<int FORMAT, int SUB>() {
    if (f.gated)
      launch_up<FORMAT, SUB, true>(stream, a);
    else
      launch_up<FORMAT, SUB, false>(stream, a);
  });
  Linear down;
  down.weight = f.down;
  down.in = f.hidden;
  down.out = f.out;
  down.bias = f.bias2;
  down.factor = f.factor;
  down.tokens = f.tokens;
  linear(stream, down);
}

}  // namespace pe::cuda
