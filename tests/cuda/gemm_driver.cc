// ffn.cu, gemm.cu and gemm.cc, flat. A weight is a packed tensor as the CPU core holds it, header included.
#include "cuda/gemm.h"
#include "cuda/tile.h"
#include "driver_matrix.h"

using namespace pe;
using namespace pe::cuda;

extern "C" {

const char* driver_error() { return last_error(); }

// linear_many with the cuBLASLt at `library`. out [tokens][rows, padded]; bias as many or nullptr.
int gemm_run(const uint8_t* weight, const float* x, int64_t tokens, const float* bias, float factor, float* out,
             const char* library) {
  return driven([&](Stream stream) {
    const DeviceMatrix w(weight);
    const Activations in(stream, x, tokens, w.cols(), w.integer());
    const FloatRows result(factor != 0.0f ? out : nullptr, tokens, w.rows());
    const Array<float> b(bias, w.rows());
    const Linear l = linear_of(w, in, result, b, factor, tokens);
    Gemm gemm(library);
    const size_t bytes = gemm_scratch_bytes(l.weight, l.tokens);
    const Array<uint8_t> scratch(static_cast<int64_t>(bytes));
    linear_many(stream, gemm, l, scratch.data(), bytes);
    must(cudaStreamSynchronize(stream));
    result.read(out);
  });
}

// hidden: float [tokens][width] or quantized, whichever `down` takes; nullptr: not wanted. out [tokens][rows of down].
int gemm_ffn(const uint8_t* up, const uint8_t* down, const float* x, int64_t tokens, const float* bias,
             const float* bias2, int64_t activation, int64_t gated, float factor, float* hidden, const HostQuant* quant,
             float* out, const char* library) {
  return driven([&](Stream stream) {
    const DeviceMatrix w(up), w2(down);
    const Activations in(stream, x, tokens, w.cols(), w.integer());
    const FloatRows floats(nullptr, tokens, w2.cols()), result(factor != 0.0f ? out : nullptr, tokens, w2.rows());
    const QuantRows quants(tokens, w2.cols());
    const Array<float> b(bias, w.rows()), b2(bias2, w2.rows());
    Ffn f;
    f.up = w.matrix();
    f.down = w2.matrix();
    f.in = in.rows();
    f.hidden = w2.integer() ? quants.rows() : floats.rows();
    f.out = result.rows();
    f.bias = b.or_null();
    f.bias2 = b2.or_null();
    f.activation = static_cast<int>(activation);
    f.gated = gated != 0;
    f.factor = factor;
    f.tokens = static_cast<int>(tokens);
    if (library) {
      Gemm gemm(library);
      const size_t bytes = ffn_scratch_bytes(f);
      const Array<uint8_t> scratch(static_cast<int64_t>(bytes));
      ffn_many(stream, gemm, f, scratch.data(), bytes);
      must(cudaStreamSynchronize(stream));
    } else {
      ffn(stream, f);
    }
    must(cudaStreamSynchronize(stream));
    floats.read(hidden);
    quants.read(quant);
    result.read(out);
  });
}

// out [rows, padded][cols]: the values of the PE_F32 matrix `into` (its raw tensor) after dequantize.
int gemm_dequantize(const uint8_t* weight, const uint8_t* into, float* out) {
  return driven([&](Stream stream) {
    const DeviceMatrix w(weight), f(into);
    dequantize(stream, w.matrix(), f.matrix());
    must(cudaStreamSynchronize(stream));
    const Matrix m = f.matrix();
    std::vector<uint8_t> tiles(static_cast<size_t>(m.panels * m.k_tiles) * m.tile_bytes);
    f.tiles().read(tiles.data());
    for (int64_t r = 0; r < f.rows(); ++r) {
      for (int64_t c = 0; c < f.cols(); ++c) {
        const uint8_t* tile = tiles.data() + (r / kPanel * m.k_tiles + c / kTileColumns) * m.tile_bytes;
        std::memcpy(out + r * f.cols() + c,
                    tile + element_at(PE_F32, static_cast<int>(r % kPanel), static_cast<int>(c % kTileColumns)), 4);
      }
    }
  });
}

// What Gemm says of itself, up to `size` bytes.
int gemm_describe(const char* library, char* text, int64_t size) {
  return guarded([&] {
    const Gemm gemm(library);
    std::strncpy(text, gemm.describe().c_str(), static_cast<size_t>(size - 1));
  });
}

}  // extern "C"
