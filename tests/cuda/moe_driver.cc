// route.cu and moe.cu, flat. Weights: driver_matrix.h.
#include <algorithm>

#include "driver_matrix.h"

using namespace pe;
using namespace pe::cuda;

namespace {

// What route fills, in device memory.
struct Sorted {
  FloatRows weights_ids;
  Array<int32_t> first_row, order, place;
  Array<uint64_t> counts;
  Routing routing;

  // chosen: [tokens][top_k weights | top_k ids] or nullptr; the others are given with it, else zeros
  Sorted(const float* chosen, const int32_t* first, const int32_t* sorted, const int32_t* at, const uint64_t* count,
         int64_t tokens, int32_t experts, int32_t top_k)
      : weights_ids(chosen, tokens, 2 * top_k),
        first_row(experts + 1),
        order(tokens * top_k),
        place(tokens * top_k),
        counts(experts) {
    const auto rows = static_cast<size_t>(tokens * top_k) * 4, all = static_cast<size_t>(experts);
    if (first) must(cudaMemcpy(first_row.data(), first, (all + 1) * 4, cudaMemcpyHostToDevice));
    if (sorted) must(cudaMemcpy(order.data(), sorted, rows, cudaMemcpyHostToDevice));
    if (at) must(cudaMemcpy(place.data(), at, rows, cudaMemcpyHostToDevice));
    if (count) must(cudaMemcpy(counts.data(), count, all * 8, cudaMemcpyHostToDevice));
    routing.weights_ids = weights_ids.rows();
    routing.first_row = first_row.data();
    routing.order = order.data();
    routing.place = place.data();
    routing.counts = counts.data();
    routing.experts = experts;
    routing.top_k = top_k;
  }
};

}  // namespace

extern "C" {

const char* driver_error() { return last_error(); }

// numbers: experts, top_k, groups, top_groups, scoring, group_score, normalise. failed: status, layer, token.
int moe_route(const uint8_t* weight, const float* x, int64_t tokens, const float* bias, const int32_t* numbers,
              float scale, float eps, int64_t layer, float* out, int32_t* first_row, int32_t* order, int32_t* place,
              uint64_t* counts, int32_t* failed) {
  return driven([&](Stream stream) {
    const DeviceMatrix w(weight);
    const FloatRows in(x, tokens, w.cols()), scores(nullptr, tokens, numbers[0]);
    const Array<float> selection(bias, numbers[0]);
    const Sorted to(nullptr, nullptr, nullptr, nullptr, counts, tokens, numbers[0], numbers[1]);
    const Failure none;
    const Array<Failure> failure(&none, 1);
    Router r;
    r.weight = w.matrix();
    r.in = in.rows();
    r.scores = scores.rows();
    r.selection_bias = selection.or_null();
    r.groups = numbers[2];
    r.top_groups = numbers[3];
    r.scoring = numbers[4];
    r.group_score = numbers[5];
    r.normalise = numbers[6];
    r.layer = static_cast<int32_t>(layer);
    r.scale = scale;
    r.eps = eps;
    Step step;
    step.failure = failure.data();
    route(stream, r, to.routing, step, static_cast<int>(tokens));
    must(cudaStreamSynchronize(stream));
    to.weights_ids.read(out);
    to.first_row.read(first_row);
    to.order.read(order);
    to.place.read(place);
    to.counts.read(counts);
    Failure found;
    failure.read(&found);
    failed[0] = found.status;
    failed[1] = found.layer;
    failed[2] = found.token;
  });
}

// chosen and how its rows are sorted are given. hidden [tokens * top_k][width], sorted (float weights alone); out
// [tokens] [rows]: written, or where factor is not 0 added to.
int moe_experts(const uint8_t* gate_up, const uint8_t* down, const float* x, int64_t tokens, const float* chosen,
                const int32_t* first_row, const int32_t* order, const int32_t* place, int64_t experts, int64_t top_k,
                int64_t activation, float factor, float* hidden, float* out, int64_t out_width) {
  return driven([&](Stream stream) {
    const DeviceMatrix w(gate_up), w2(down);
    const Activations in(stream, x, tokens, w.cols(), w.integer());
    const Sorted sorted(chosen, first_row, order, place, nullptr, tokens, static_cast<int32_t>(experts),
                        static_cast<int32_t>(top_k));
    const int64_t rows = tokens * top_k;
    const FloatRows floats(nullptr, rows, w2.cols()), products(nullptr, rows, out_width);
    const QuantRows quants(rows, w2.cols());
    const FloatRows result(factor != 0.0f ? out : nullptr, tokens, out_width);
    const Rows acts = w2.integer() ? quants.rows() : floats.rows();
    moe_gate_up(stream, w.matrix(), in.rows(), static_cast<int>(activation), acts, sorted.routing,
                static_cast<int>(tokens));
    moe_down(stream, w2.matrix(), acts, products.rows(), factor, result.rows(), sorted.routing,
             static_cast<int>(tokens));
    must(cudaStreamSynchronize(stream));
    if (!w2.integer()) floats.read(hidden);
    result.read(out);
  });
}

// The same experts one by one: out [tokens][width] of one expert's matrices, by the dense kernels.
int moe_dense(const uint8_t* gate_up, const uint8_t* down, const float* x, int64_t tokens, int64_t activation,
              float* out, int64_t width) {
  return driven([&](Stream stream) {
    const DeviceMatrix w(gate_up), w2(down);
    const Activations in(stream, x, tokens, w.cols(), w.integer());
    const FloatRows floats(nullptr, tokens, w2.cols()), result(nullptr, tokens, w2.rows());
    const QuantRows quants(tokens, w2.cols());
    Ffn f;
    f.up = w.matrix();
    f.down = w2.matrix();
    f.in = in.rows();
    f.hidden = w2.integer() ? quants.rows() : floats.rows();
    f.out = result.rows();
    f.activation = static_cast<int>(activation);
    f.tokens = static_cast<int>(tokens);
    ffn(stream, f);
    must(cudaStreamSynchronize(stream));
    std::vector<float> all(static_cast<size_t>(tokens * w2.rows()));
    result.read(all.data());
    for (int64_t t = 0; t < tokens; ++t) std::copy_n(all.data() + t * w2.rows(), width, out + t * width);
  });
}

}  // extern "C"
