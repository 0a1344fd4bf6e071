// A block's part of a matrix times up to 8 rows of activations: what linear.cu, ffn.cu and the experts of moe.cu are
// made of. A block of 8 warps takes R neighbouring panels; warp w takes the tiles w, w + 8, w + 16 ... of K of all of
// them and adds them up in registers, ascending; at the end the 8 warps' sums are added in shared memory, ascending.
// Nothing of this depends on R or on the number of tokens, so neither do the bits of a row.
//
//   extern shared memory of shared_bytes<FORMAT, SUB, R>(most tokens), then in the kernel, by the whole block:
//     multiply<FORMAT, SUB, R>(m, panel, panels, in, tokens, shared_memory(), ready);
//     ... block_result<R>(shared_memory(), p, j, r) is row r of panel `panel + p` for token j ...
//     __syncthreads() before the next multiply
//
// m.tiles is read from panel `panel` on; panels (1 .. R) of them count. Tokens name rows of `in`, by a list where they
// are gathered. `ready()` is called when the first loads of weights are on their way and before anything else is read:
// it is where a kernel waits for the one in front (and does nothing where the choice of panels came from there
// already).
//
// Weights pass through a ring of tiles in shared memory, one a warp, so the main loop has no barrier of the block.
// Activations come before the loop where they are few, else with the first panel's tile of the same columns. int8 and
// int4: exact int32 sums in a sub-block, begun at -offset * sum of activations, then group = sum * number (+ ...), f =
// fma(group, act scale, f), as on the CPU; the units of the rows, times powers of two that keep f and the numbers near
// 1, are multiplied in at the end.
#pragma once

#include "cuda/products.cuh"

namespace pe::cuda {

// The sums of all tokens are left in shared memory: block_result.
template <int FORMAT, int SUB, int R, class Ready>
__device__ __forceinline__ void multiply(const Matrix& m, int64_t panel, int panels, const Rows& in,
                                         const Tokens& tokens, uint8_t* shared, Ready&& ready) {
  using S = Sizes<FORMAT, SUB, R>;
  constexpr bool kFloat = S::kFloat;
  static_assert(fits<FORMAT, SUB, R>);
  const int warp = warp_id(), lane = lane_id(), k_tiles = static_cast<int>(m.k_tiles);
  const int mine = warp < k_tiles ? (k_tiles - warp + kWarps - 1) / kWarps : 0;  // tiles of columns
  const uint32_t slab_size = slab_bytes<kFloat>(tokens.count);
  const int slabs = slabs_of<FORMAT, SUB, R>(tokens.count, k_tiles);
  uint8_t* const ring = shared + warp * S::kRing;
  uint8_t* const first_slab = shared + kWarps * S::kRing + static_cast<uint32_t>(warp * slabs) * slab_size;
  uint8_t* const end_slab = first_slab + static_cast<uint32_t>(slabs) * slab_size;
  constexpr int64_t kNext = int64_t{kWarps} * S::kTile;  // from a warp's tile to its next
  const int64_t panel_bytes = m.k_tiles * S::kTile;
  const uint8_t* source = m.tiles + panel * panel_bytes + warp * S::kTile + 16 * lane;
  const auto load = [&](const uint8_t* from, uint8_t* slot) {
    PE_UNROLL_ALL for (uint32_t at = 0; at < S::kTile; at += 512) {
      if (at + 512 <= S::kTile || at + 16 * static_cast<uint32_t>(lane) < S::kTile)
        copy_async16(slot + 16 * lane + at, from + at);
    }
  };
  PE_UNROLL_ALL for (int i = 0; i < S::kSlots - 1; ++i) {
    if (i / R < mine) load(source + i / R * kNext + min(i % R, panels - 1) * panel_bytes, ring + i * S::kTile);
    copy_async_commit();
  }
  ready();
  const auto columns = [&] {
    if constexpr (kFloat)
      return FloatColumns(in, tokens, m.cols);
    else
      return QuantColumns<FORMAT, SUB>(in, tokens);
  }();
  const int staged = slabs >= mine ? mine : (S::kSlots - 2) / R + 1;  // slabs that are loaded before the loop
  for (int j = 0; j < staged; ++j) columns.copy(warp + j * kWarps, first_slab + static_cast<uint32_t>(j) * slab_size);
  copy_async_commit();
  if (mine * R < S::kSlots) let_next_start();
  copy_async_wait<0>();

  const auto product_of = [&] {
    if constexpr (kFloat)
      return FloatProduct<FORMAT, R>(tokens.count);
    else
      return IntegerProduct<FORMAT, SUB, R>(tokens.count);
  };
  auto product = product_of();
  uint8_t *slot = ring, *free_slot = ring + (S::kSlots - 1) * S::kTile, *slab = first_slab;
  for (int j = 0; j < mine; ++j) {
    PE_UNROLL_ALL for (int p = 0; p < R; ++p) {
      copy_async_wait<S::kSlots - 2>();
      __syncwarp();  // all lanes' copies are there, and all lanes are done with the slot behind
      const int ahead = (p + S::kSlots - 1) / R, next_panel = (p + S::kSlots - 1) % R;
      if (j + ahead < mine) {
        load(source + ahead * kNext + min(next_panel, panels - 1) * panel_bytes, free_slot);
        if (next_panel == 0 && j + ahead >= staged) {
          uint8_t* to = slab + static_cast<uint32_t>(ahead) * slab_size;
          if (to >= end_slab) to -= static_cast<uint32_t>(slabs) * slab_size;
          columns.copy(warp + (j + ahead) * kWarps, to);
        }
        if (next_panel == R - 1 && j + ahead == mine - 1) let_next_start();
      }
      copy_async_commit();
      if (p == 0) product.begin(slab);
      product.add_tile(p, slot);
      free_slot = slot;
      slot += S::kTile;
      if (slot == ring + S::kRing) slot = ring;
    }
    source += kNext;
    slab += slab_size;
    if (slab == end_slab) slab = first_slab;
  }
  __syncthreads();  // the sums take the place of the rings
  const int units = FORMAT == PE_INT4_MIN ? 2 * kPanel : kPanel;
  PE_UNROLL_ALL for (int p = 0; p < R; ++p) {
    float* sums = reinterpret_cast<float*>(shared) + (warp * R + p) * (kFewTokens * kSumStride);
    product.store(p, kFloat ? nullptr : m.units + (panel + min(p, panels - 1)) * units, sums);
  }
  __syncthreads();
}

// Row r of panel p for token j, after `multiply`.
template <int R>
__device__ __forceinline__ float block_result(const uint8_t* shared, int p, int j, int r) {
  const float* sums = reinterpret_cast<const float*>(shared) + (p * kFewTokens + j) * kSumStride + r;
  float sum = sums[0];
  for (int w = 1; w < kWarps; ++w) sum += sums[w * R * kFewTokens * kSumStride];
  return sum;
}

// ---- launches -------------------------------------------------------------------------------------------------------

// body.operator()<FORMAT, SUB>() of a matrix.
template <class Body>
void with_format(const Matrix& m, Body&& body) {
  const bool halves = m.group == 32;
  switch (m.format) {
    case PE_F32: return body.template operator()<PE_F32, kTileColumns>();
    case PE_BF16: return body.template operator()<PE_BF16, kTileColumns>();
    case PE_INT8: return body.template operator()<PE_INT8, kTileColumns>();
    case PE_INT4_SYM:
      return halves ? body.template operator()<PE_INT4_SYM, 32>() : body.template operator()<PE_INT4_SYM, 64>();
    case PE_INT4_MIN:
      return halves ? body.template operator()<PE_INT4_MIN, 32>() : body.template operator()<PE_INT4_MIN, 64>();
    default: fail(PE_UNSUPPORTED, "a product with a matrix of format %s on CUDA", format_name(m.format));
  }
}

inline void check_activations(const Matrix& m, const Rows& in) {
  if (in.quantized == is_float_format(m.format))
    fail(PE_INTERNAL, "activations of a product with %s are %s", format_name(m.format),
         in.quantized ? "quantized" : "float32");
}

// More than 48 KB of shared memory must be asked for, and several blocks a multiprocessor take most of what it has: the
// rest is L1, which nothing here needs.
template <class Kernel>
void allow_shared(Kernel* kernel, size_t bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100), "shared memory");
  if (bytes > (48u << 10))
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
          "shared memory");
}

inline unsigned chunks_of(int tokens) { return static_cast<unsigned>((tokens + kFewTokens - 1) / kFewTokens); }

}  // namespace pe::cuda
