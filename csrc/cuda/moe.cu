// The experts of a mixture: grouped products over the rows that route.cu sorted by expert, in tiles of up to 8 rows of
// one expert. Grids are for the most tiles there can be; a block finds its own, and leaves where there is none. A row's
// bits are those of the expert's matrix alone, and a token's slots are added best first: nothing depends on the other
// rows.
#include <algorithm>

#include "cuda/hidden.cuh"

namespace pe::cuda {

namespace {

constexpr int kThreads = 256;

struct RowTile {
  int expert = 0, first = 0, count = 0;  // sorted rows; count 0: no such tile
};

// Every warp for itself: tile number `tile`, of all experts' one after the other.
__device__ RowTile find_tile(const int32_t* first_row, int experts, int tile) {
  const int lane = lane_id();
  int before = 0;
  for (int base = 0; base < experts; base += kWarp) {
    const int expert = base + lane;
    const int begin = expert < experts ? first_row[expert] : 0, end = expert < experts ? first_row[expert + 1] : 0;
    const int tiles = (end - begin + kFewTokens - 1) / kFewTokens;
    int until = tiles;
    for (int step = 1; step < kWarp; step *= 2) {
      const int left = __shfl_up_sync(kAllLanes, until, step);
      if (lane >= step) until += left;
    }
    until += before;
    const unsigned behind = __ballot_sync(kAllLanes, until > tile);
    if (behind) {
      const int at = __ffs(static_cast<int>(behind)) - 1;
      const int first = begin + (tile - (until - tiles)) * kFewTokens;
      RowTile found;
      found.expert = base + at;
      found.first = __shfl_sync(kAllLanes, first, at);
      found.count = min(kFewTokens, __shfl_sync(kAllLanes, end, at) - found.first);
      return found;
    }
    before = __shfl_sync(kAllLanes, until, kWarp - 1);
  }
  return {};
}

struct Experts {
  Matrix weight;
  Rows in, out;
  Routing routing;
  int activation = 0;
  int64_t panels = 0;  // of an expert
};

template <int FORMAT, int SUB>
__global__ void __launch_bounds__(kBlockThreads, 2) gate_up_kernel(Experts a) {
  constexpr int R = kHiddenPanels<true>;
  wait_for_previous();
  const RowTile tile = find_tile(a.routing.first_row, a.routing.experts, static_cast<int>(blockIdx.x));
  if (tile.count == 0) return;
  const int64_t group = blockIdx.y, first = tile.expert * a.panels + group * R;
  Tokens tokens;
  tokens.index = a.routing.order;
  tokens.per_row = a.routing.top_k;
  tokens.first = tile.first;
  tokens.count = tile.count;
  uint8_t* shared = shared_memory();
  multiply<FORMAT, SUB, R>(a.weight, first, static_cast<int>(min(int64_t{R}, a.panels - group * R)), a.in, tokens,
                           shared, [] {});
  if (warp_id() < tile.count)
    write_hidden<true>(shared, warp_id(), nullptr, a.activation, a.out, tile.first + warp_id(), group);
}

// The kernel in front is of this layer's experts, too, and lets this one start when it has itself waited for the
// router: which rows are whose is known before the wait, and weights are on their way.
template <int FORMAT, int SUB, int R>
__global__ void __launch_bounds__(kBlockThreads, 2) down_kernel(Experts a) {
  const RowTile tile = find_tile(a.routing.first_row, a.routing.experts, static_cast<int>(blockIdx.x));
  if (tile.count == 0) return wait_for_previous();
  const int64_t first = int64_t{blockIdx.y} * R;
  const int panels = static_cast<int>(min(int64_t{R}, a.panels - first)), wide = panels * kPanel;
  Tokens tokens;
  tokens.first = tile.first;
  tokens.count = tile.count;
  uint8_t* shared = shared_memory();
  multiply<FORMAT, SUB, R>(a.weight, tile.expert * a.panels + first, panels, a.in, tokens, shared,
                           [] { wait_for_previous(); });
  for (int i = static_cast<int>(threadIdx.x); i < tile.count * wide; i += kBlockThreads) {
    const int j = i / wide, row = i % wide;
    a.out.f[(tile.first + j) * a.out.stride + first * kPanel + row] =
        block_result<R>(shared, row / kPanel, j, row % kPanel);
  }
}

// A token's rows times their weights, best expert first.
__global__ void __launch_bounds__(kThreads) add_slots_kernel(Rows rows, Routing routing, float factor, Rows out) {
  wait_for_previous();
  let_next_start();
  const int64_t token = blockIdx.x, c = int64_t{blockIdx.y} * kThreads + threadIdx.x;
  if (c >= out.width) return;
  const float* weights = routing.weights_ids.f + token * routing.weights_ids.stride;
  const int32_t* place = routing.place + token * routing.top_k;
  float sum = 0.0f;
  for (int s = 0; s < routing.top_k; ++s) sum = fmaf(rows.f[place[s] * rows.stride + c], weights[s], sum);
  float& y = out.f[token * out.stride + c];
  y = factor != 0.0f ? fmaf(sum, factor, y) : sum;
}

Experts experts_of(const Matrix& weight, const Rows& in, const Rows& out, const Routing& routing) {
  check_activations(weight, in);
  if (routing.experts < 1 || weight.panels % routing.experts)
    fail(PE_INTERNAL, "%lld panels of %d experts", static_cast<long long>(weight.panels), routing.experts);
  Experts a;
  a.weight = weight;
  a.in = in;
  a.out = out;
  a.routing = routing;
  a.panels = weight.panels / routing.experts;
  return a;
}

// The most tiles that so many tokens' rows can make.
int64_t most_tiles(const Routing& r, int tokens) {
  const int64_t rows = int64_t{tokens} * r.top_k, active = rows < r.experts ? rows : r.experts;
  return (rows + (kFewTokens - 1) * active) / kFewTokens;
}

template <class Kernel>
void launch_experts(Stream stream, Kernel* kernel, size_t bytes, const Experts& a, int tokens, int panels) {
  allow_shared(kernel, bytes);
  const dim3 grid(static_cast<unsigned>(most_tiles(a.routing, tokens)),
                  static_cast<unsigned>((a.panels + panels - 1) / panels));
  launch(stream, kernel, grid, dim3(kBlockThreads), bytes, a);
}

}  // namespace

void moe_gate_up(Stream stream, const Matrix& weight, const Rows& in, int activation, const Rows& out,
                 const Routing& routing, int tokens) {
  if (tokens <= 0) return;
  Experts a = experts_of(weight, in, out, routing);
  a.activation = activation;
  with_format(weight, [&]<int FORMAT, int SUB>() {
    constexpr int R = kHiddenPanels<true>;
    launch_experts(stream, gate_up_kernel<FORMAT, SUB>, shared_bytes<FORMAT, SUB, R>(std::min(tokens, kFewTokens)), a,
                   tokens, R);
  });
}

void moe_down(Stream stream, const Matrix& weight2, const Rows& in, const Rows& rows, float factor, const Rows& out,
              const Routing& routing, int tokens) {
  if (tokens <= 0) return;
  const Experts a = experts_of(weight2, in, rows, routing);
  const int most = std::min(tokens, kFewTokens);
  with_format(weight2, [&]<int FORMAT, int SUB>() {
    // as for linear: the fewest panels a block that leave no more blocks than run at once
    if (a.panels * most_tiles(routing, tokens) <= 4 * 132)
      launch_experts(stream, down_kernel<FORMAT, SUB, 1>, shared_bytes<FORMAT, SUB, 1>(most), a, tokens, 1);
    else
      launch_experts(stream, down_kernel<FORMAT, SUB, 4>, shared_bytes<FORMAT, SUB, 4>(most), a, tokens, 4);
  });
  const dim3 grid(static_cast<unsigned>(tokens), static_cast<unsigned>((out.width + kThreads - 1) / kThreads));
  launch(stream, add_slots_kernel, grid, dim3(kThreads), 0, rows, routing, factor, out);
}

}  // namespace pe::cuda
