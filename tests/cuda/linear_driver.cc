// linear.cu, flat. A weight is a packed tensor as the CPU core holds it, header included.
#include "driver_matrix.h"

using namespace pe;
using namespace pe::cuda;

extern "C" {

const char* driver_error() { return last_error(); }

// out [tokens][rows, padded]; bias as many or nullptr.
int linear_run(const uint8_t* weight, const float* x, int64_t tokens, const float* bias, float factor, float* out) {
  return driven([&](Stream stream) {
    const DeviceMatrix w(weight);
    const Activations in(stream, x, tokens, w.cols(), w.integer());
    const FloatRows result(factor != 0.0f ? out : nullptr, tokens, w.rows());
    const Array<float> b(bias, w.rows());
    linear(stream, linear_of(w, in, result, b, factor, tokens));
    must(cudaStreamSynchronize(stream));
    result.read(out);
  });
}

// x [tokens][heads * head_dim], out [tokens][width]; rope [positions][rotary].
int linear_heads(const uint8_t* weight, const float* x, int64_t tokens, int64_t heads, int64_t head_dim,
                 const float* values, int64_t positions, int64_t rotary, const int32_t* at, float* out, int64_t width) {
  return driven([&](Stream stream) {
    const DeviceMatrix w(weight);
    const FloatRows in(x, tokens, heads * head_dim), result(nullptr, tokens, width);
    const Array<float> table(values, positions * rotary);
    const Array<int32_t> where(at, tokens);
    Rope rope;
    rope.values = table.data();
    rope.rotary_dim = static_cast<int32_t>(rotary);
    Step step;
    step.positions = where.data();
    head_linear(stream, w.matrix(), in.rows(), static_cast<int>(heads), static_cast<int>(head_dim),
                rotary ? &rope : nullptr, result.rows(), step, static_cast<int>(tokens));
    must(cudaStreamSynchronize(stream));
    result.read(out);
  });
}

}  // extern "C"
