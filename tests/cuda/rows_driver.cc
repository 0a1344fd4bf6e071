// rows.cu, flat.
#include "driver_matrix.h"

using namespace pe;
using namespace pe::cuda;

extern "C" {

const char* driver_error() { return last_error(); }

// to 0: float, 1: quantized, 2: out += scale * norm
int rows_norm(const float* x, int64_t given, int64_t width, const float* weight, const float* bias, int64_t kind,
              float eps, const int32_t* picked, int64_t count, int64_t to, float scale, float* out,
              const HostQuant* quant) {
  return driven([&](Stream stream) {
    const FloatRows in(x, given, width), floats(to == 2 ? out : nullptr, count, width);
    const QuantRows quants(count, width);
    const Array<float> w(weight, width), b(bias, width);
    const Array<int32_t> rows(picked, count);
    const Norm n{w.data(), b.or_null(), static_cast<int32_t>(kind), eps};
    if (to == 2)
      norm_residual(stream, in.rows(), n, scale, floats.rows(), static_cast<int>(count));
    else
      norm(stream, in.rows(), n, to == 1 ? quants.rows() : floats.rows(), static_cast<int>(count), rows.or_null());
    must(cudaStreamSynchronize(stream));
    floats.read(out);
    quants.read(quant);
  });
}

int rows_quantize(const float* x, int64_t count, int64_t width, const HostQuant* quant) {
  return driven([&](Stream stream) {
    const FloatRows in(x, count, width);
    const QuantRows out(count, width);
    quantize(stream, in.rows(), out.rows(), static_cast<int>(count));
    must(cudaStreamSynchronize(stream));
    out.read(quant);
  });
}

int rows_add(const float* x, float scale, float* y, int64_t count, int64_t width) {
  return driven([&](Stream stream) {
    const FloatRows in(x, count, width), out(y, count, width);
    add(stream, in.rows(), scale, out.rows(), static_cast<int>(count));
    must(cudaStreamSynchronize(stream));
    out.read(y);
  });
}

// gated: x [count][2 * width], interleaved; else [count][width]. Into y, or where `quant` is given into that.
int rows_act(const float* x, int64_t gated, int64_t activation, float* y, const HostQuant* quant, int64_t count,
             int64_t width) {
  return driven([&](Stream stream) {
    const FloatRows in(x, count, gated ? 2 * up(width, kPanel) : width), floats(nullptr, count, up(width, kPanel));
    const QuantRows quants(count, width);
    (gated ? act_mul : act)(stream, in.rows(), static_cast<int>(activation), quant ? quants.rows() : floats.rows(),
                            static_cast<int>(count));
    must(cudaStreamSynchronize(stream));
    floats.read(y);
    quants.read(quant);
  });
}

int rows_mask(const float* mask, float* y, int64_t count, int64_t width) {
  return driven([&](Stream stream) {
    const FloatRows out(y, count, width);
    const Array<float> m(mask, width);
    mask_columns(stream, m.data(), out.rows(), static_cast<int>(count));
    must(cudaStreamSynchronize(stream));
    out.read(y);
  });
}

int rows_gate(const float* x, int64_t in_width, const float* weight, float* y, int64_t count, int64_t width) {
  return driven([&](Stream stream) {
    const FloatRows in(x, count, in_width), out(y, count, width);
    const Array<float> w(weight, in_width);
    gate(stream, in.rows(), w.data(), out.rows(), static_cast<int>(count));
    must(cudaStreamSynchronize(stream));
    out.read(y);
  });
}

int rows_tap(const float* x, const int32_t* place, float* y, int64_t count, int64_t width) {
  return driven([&](Stream stream) {
    const FloatRows in(x, count, width);
    const Array<int32_t> at(place, count);
    const Array<float> out(count * width);
    tap(stream, in.rows(), at.or_null(), out.data(), static_cast<int>(count));
    must(cudaStreamSynchronize(stream));
    out.read(y);
  });
}

int rows_embed(const void* table, int64_t ids_known, int64_t bf16, const float* places, int64_t positions, float scale,
               const int32_t* ids, const int32_t* at, float* y, int64_t count, int64_t width) {
  return driven([&](Stream stream) {
    const Array<uint8_t> data(static_cast<const uint8_t*>(table), ids_known * width * (bf16 ? 2 : 4));
    const Array<float> place(places, positions * width);
    const Array<int32_t> tokens(ids, count), where(at, count);
    Table t{}, p{};
    t.data = data.data();
    t.format = bf16 ? PE_ROWS_BF16 : PE_ROWS_F32;
    t.rows = ids_known;
    t.cols = p.cols = width;
    p.data = place.data();
    p.format = PE_ROWS_F32;
    p.rows = positions;
    Step step{};
    step.token_ids = tokens.data();
    step.positions = where.data();
    const FloatRows out(nullptr, count, width);
    embed(stream, t, places ? &p : nullptr, scale, out.rows(), step, static_cast<int>(count));
    must(cudaStreamSynchronize(stream));
    out.read(y);
  });
}

int rows_embed_packed(const uint8_t* table, float scale, const int32_t* ids, float* y, int64_t count, int64_t width) {
  return driven([&](Stream stream) {
    const DeviceMatrix w(table);
    const Array<int32_t> tokens(ids, count);
    Table t{};
    t.matrix = w.matrix();
    t.format = t.matrix.format;
    t.rows = t.matrix.rows;
    t.cols = t.matrix.cols;
    Step step{};
    step.token_ids = tokens.data();
    const FloatRows out(nullptr, count, width);
    embed(stream, t, nullptr, scale, out.rows(), step, static_cast<int>(count));
    must(cudaStreamSynchronize(stream));
    out.read(y);
  });
}

}  // extern "C"
