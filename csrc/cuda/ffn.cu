// The FFN of up to 8 tokens in two kernels: a block computes 64 intermediate columns (8 panels where gate and up
// alternate, else 4), applies the activation and writes them as one finished group of int8; then down is a linear.
#include "cuda/hidden.cuh"

namespace pe::cuda {

namespace {

struct Up {
  Matrix weight;
  Rows in, hidden;
  const float* bias = nullptr;
  int activation = 0, tokens = 0;
};

template <int FORMAT, int SUB, bool GATED>
__global__ void __launch_bounds__(kBlockThreads, 2) ffn_up_kernel(Up a) {
  constexpr int R = kHiddenPanels<GATED>;
  const int64_t group = blockIdx.x, first = group * R;
  const int panels = static_cast<int>(min(static_cast<int64_t>(R), a.weight.panels - first));
  Tokens tokens;
  tokens.first = static_cast<int64_t>(blockIdx.y) * kFewTokens;
  tokens.count = static_cast<int>(min(static_cast<int64_t>(kFewTokens), a.tokens - tokens.first));
  uint8_t* shared = shared_memory();
  multiply<FORMAT, SUB, R>(a.weight, first, panels, a.in, tokens, shared, [] { wait_for_previous(); });
  const int j = warp_id();  // a warp a token
  if (j < tokens.count)
    write_hidden<GATED>(shared, j, a.bias ? a.bias + first * kPanel : nullptr, a.activation, a.hidden, tokens.first + j,
                        group);
}

template <int FORMAT, int SUB, bool GATED>
void launch_up(Stream stream, const Up& a) {
  constexpr int R = kHiddenPanels<GATED>;
  const size_t bytes = shared_bytes<FORMAT, SUB, R>(a.tokens < kFewTokens ? a.tokens : kFewTokens, a.weight.k_tiles);
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
  linear(stream, f.second());
}

}  // namespace pe::cuda
