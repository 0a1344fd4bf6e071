// The CUDA kernels as the runtime sees them: plain structs of device pointers, and functions that launch on a stream
// and return at once. Nothing here allocates, synchronises or reads device memory on the host, so every call can be
// captured in a graph. Grids depend on the sizes in the arguments alone (tokens, sequences, most partitions), never on
// the values in a Step, so that a captured graph can be replayed when only those change.
//
// A launch that the driver refuses throws Error(PE_RESOURCE); what a kernel finds wrong in the numbers goes to
// Step::failure.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/formats.h"
#include "cpu/kernel_table.h"

namespace pe::cuda {

using Stream = cudaStream_t;

constexpr int kTileColumns = 64;  // a tile: 16 rows (one panel) x 64 columns, the group of activations
constexpr int kFewTokens =
    8;  // up to here `linear` has the same bits for a row, whatever the batch (one mma column a token)

// A packed weight in device memory, in the order in which the tensor cores take it (repack.h; docs/cuda.md). Tiles of a
// panel stand side by side, panels one behind the other; a tile carries its data and then the scales of its groups.
struct Matrix {
  const uint8_t* tiles = nullptr;  // [panels][k_tiles][tile_bytes]
  const float* units = nullptr;    // integer formats: [panels][16] units of scales; PE_INT4_MIN: [panels][2][16]
  int32_t format = 0, group = 0;   // pe_format
  int64_t rows = 0, cols = 0, panels = 0, k_tiles = 0;
  uint32_t tile_bytes = 0;
};

// A table of rows to gather from: PE_ROWS_F32, PE_ROWS_BF16 (`data`), or a packed weight (`matrix`).
struct Table {
  const void* data = nullptr;
  Matrix matrix{};
  int32_t format = 0;
  int64_t rows = 0, cols = 0;
};

// Rows of float32 or of quantized activations, as pe::Buffer lays them out (runtime/plan.cc), in device memory.
struct Rows {
  float* f = nullptr;  // [T][stride]
  int64_t stride = 0, width = 0;
  bool quantized = false;
  QuantView quant{};  // device pointers
};

// The first NaN or Inf of a run: which op's check found it. Written with atomicCAS on `status`.
struct Failure {
  int32_t status = 0;  // pe_status
  int32_t layer = -1, token = -1;
};

// What a run is about. All pointers are device memory of the program, at addresses that never change; the contents are
// copied there before every run.
struct Step {
  const int32_t* token_ids = nullptr;    // [T]
  const int32_t* positions = nullptr;    // [T]
  const int32_t* sequences = nullptr;    // [T] the sequence a token belongs to
  const int32_t* query_start = nullptr;  // [S + 1]
  const int32_t* logits_rows = nullptr;  // [R]
  Failure* failure = nullptr;            // the first NaN or Inf; zeroed before a run
  int32_t table_width = 0;               // of every KvView::table
};

struct Rope {
  const float* values = nullptr;    // [positions][rotary_dim]: cos, then sin
  const float* q_scales = nullptr;  // [positions] or nullptr
  int32_t rotary_dim = 0;
};

// One layer of a KV group (kv_layout.h makes it). Block b of head h starts at base + b * block_bytes + h * head_bytes,
// K first, V at v_offset. K is [32][k_stride], V is [32][v_stride] of float32, bfloat16 or int8 (token by token: a warp
// reads whole rows), padded with zeros to 16 values; int8: the float32 scales of its 32 tokens follow each: K scales at
// k_scales, V scales at v_scales, from the head's start.
struct KvView {
  uint8_t* base = nullptr;  // of this layer
  int64_t block_bytes = 0, head_bytes = 0, v_offset = 0, k_scales = 0, v_scales = 0;
  int32_t kv_heads = 0, k_dim = 0, v_dim = 0, k_stride = 0, v_stride = 0;
  int32_t dtype = 0;               // pe_kv_dtype
  const int32_t* table = nullptr;  // [S][Step::table_width] block ids of this group
};

// ---- rows.cu: a token, or a row of experts, at a time ---------------------------------------------------------------

struct Norm {
  const float* weight = nullptr;  // [width]
  const float* bias = nullptr;    // layer norm, or nullptr
  int32_t kind = 0;               // pe_norm
  float eps = 0;
};

void embed(Stream, const Table&, const Table* of_positions, float scale, const Rows& out, const Step&, int tokens);
// out: float32 or quantized. rows: of `in`, by default its first `count`; else in[step.logits_rows[r]].
void norm(Stream, const Rows& in, const Norm&, const Rows& out, int count, const int32_t* rows = nullptr);
void norm_residual(Stream, const Rows& in, const Norm&, float scale, const Rows& out, int count);
void quantize(Stream, const Rows& in, const Rows& out, int count);
void add(Stream, const Rows& in, float scale, const Rows& out, int count);  // out += scale * in
void act_mul(Stream, const Rows& in, int activation, const Rows& out, int count);
void act(Stream, const Rows& in, int activation, const Rows& out, int count);
void mask_columns(Stream, const float* mask, const Rows& out, int count);
void gate(Stream, const Rows& in, const float* weight, const Rows& out, int count);
void load(Stream, const float* from, const Rows& out, int count);  // from: [count][width]
// place: row -> where it lies (sorted experts), or nullptr
void tap(Stream, const Rows& in, const int32_t* place, float* out, int count);

// ---- linear.cu: 1 to 8 tokens on integer tensor cores (bf16 and f32 weights: float), any number in chunks of 8 ------

struct Linear {
  Matrix weight;
  Rows in, out;                 // integer weights: in.quantized
  const float* bias = nullptr;  // [panels * 16] or nullptr
  float factor = 0;             // not 0: out += factor * result
  int tokens = 0;
};
void linear(Stream, const Linear&);

// FFN of a layer: act(in . weight^T) (gated: gate and up interleaved by panels) into `hidden` (quantized for integer
// weights), then out (+= factor *) hidden . down^T. Two kernels; fused_up is the first alone.
struct Ffn {
  Matrix up, down;
  Rows in, hidden, out;
  const float *bias = nullptr, *bias2 = nullptr;
  int activation = 0;
  bool gated = true;
  float factor = 0;
  int tokens = 0;
  Linear second() const { return {down, hidden, out, bias2, factor, tokens}; }
};
void ffn(Stream, const Ffn&);

// W_UK and W_UV of latent attention: head by head (docs of PE_OP_HEAD_LINEAR).
void head_linear(Stream, const Matrix&, const Rows& in, int heads, int head_dim, const Rope*, const Rows& out,
                 const Step&, int tokens);
// PE_OP_DEQUANTIZE: into the tiles of a PE_F32 matrix.
void dequantize(Stream, const Matrix&, const Matrix& out);

// ---- gemm.cu: many tokens: both sides as bfloat16 (float32 for f32 weights) into scratch, then cuBLASLt
// --------------

class Gemm;  // opened once a backend; gemm.h
size_t gemm_scratch_bytes(const Matrix&, int tokens);
void linear_many(Stream, Gemm&, const Linear&, void* scratch, size_t scratch_bytes);

// ---- attention.cu ---------------------------------------------------------------------------------------------------

struct Heads {
  int32_t heads = 0, kv_heads = 0, head_dim = 0;
  int64_t k_column = 0, v_column = 0;  // of [q | k | v]
};
// What follows the linear of q, k and v, in one kernel: per-head (or whole) norms, rope, append. Each part is optional.
struct FinishHeads {
  Heads heads;
  Rows qkv;
  const float *q_norm = nullptr, *k_norm = nullptr;
  bool whole_norms = false;
  float eps = 0;
  const Rope* rope = nullptr;
  const KvView* kv = nullptr;
  int tokens = 0;
};
void finish_heads(Stream, const FinishHeads&, const Step&);
void latent_append(Stream, const Rows& in, const float* norm, float eps, const Rope&, const KvView&, const Step&,
                   int tokens);

struct Attention {
  int32_t heads = 0, head_dim = 0, window = 0;
  float scale = 0, softcap = 0;
  Rows q, out;     // out: float32 [heads * v_dim]
  Rows quantized;  // where `quantize` is set: out as int8, too
  bool quantize = false;
  KvView kv;
  int tokens = 0, sequences = 0;
  int32_t max_partitions = 0;  // of 256 keys: of the longest context this call may see
  float* partials = nullptr;   // attention_scratch_floats(...) floats
};
// Enough for this call and for every one with fewer tokens or partitions. Throws Error(PE_UNSUPPORTED) where the heads
// are too wide for the kernels; so what it was asked for can be launched.
size_t attention_scratch_floats(const Attention&);
void attention(Stream, const Attention&, const Step&);

// ---- route.cu, moe.cu
// ----------------------------------------------------------------------------------------------------

// Rows of tokens sorted by expert; all arrays are device memory of the program, filled by `route`.
struct Routing {
  Rows weights_ids;              // the router's output: [T][top_k weights | top_k ids], float32
  int32_t* first_row = nullptr;  // [experts + 1]
  int32_t* order = nullptr;      // [T * top_k] sorted -> row
  int32_t* place = nullptr;      // [T * top_k] row -> sorted
  uint64_t* counts = nullptr;    // [experts] tokens since the last reset: added to
  int32_t experts = 0, top_k = 0;
};
struct Router {
  Matrix weight;
  Rows in, scores;  // scratch [T][experts]
  const float* selection_bias = nullptr;
  int32_t groups = 1, top_groups = 1, scoring = 0, group_score = 0, normalise = 0, layer = 0;
  float scale = 1, eps = 0;
};
void route(Stream, const Router&, const Routing&, const Step&, int tokens);  // scores, choice, sorting; checks finite
// Experts' matrices stand one behind the other (panels of expert e from e * panels / experts).
void moe_gate_up(Stream, const Matrix& weight, const Rows& in, int activation, const Rows& out, const Routing&,
                 int tokens);
void moe_down(Stream, const Matrix& weight2, const Rows& in, const Rows& rows, float factor, const Rows& out,
              const Routing&, int tokens);  // factor 0: out = ..., else out += factor * ...

// ---- sample.cu ------------------------------------------------------------------------------------------------------

constexpr int kMaxDeviceTopK = 64;
// One row of what is sampled on the device: greedy, or temperature with 1 <= top_k <= 64, no penalties, bias, top-p or
// min-p (those rows are sampled on the host from copied logits, by the CPU backend's sampler).
struct SampleRow {
  float temperature;  // 0: greedy
  int32_t top_k;
  uint64_t seed, step;
  int32_t target;  // id whose log probability is wanted, or -1
};
struct SampleOut {
  int32_t id;
  float logprob, target_logprob;
  int32_t finite;  // 0: a NaN or Inf among the logits
};
// x = cap * tanh(x / cap)
void softcap(Stream, const Rows& logits, float cap, int rows);
// scratch: sample_scratch_bytes(rows, vocab)
size_t sample_scratch_bytes(int rows, int64_t vocab);
void sample(Stream, const Rows& logits, const SampleRow* params, SampleOut* out, void* scratch, int rows);

}  // namespace pe::cuda
