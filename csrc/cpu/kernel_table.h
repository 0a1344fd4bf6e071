// What an ISA object exports: one constant table of kernels, and the plain structs they take.
//
// Kernels work on a range and know nothing of threads; the runtime shares ranges out. Nothing here has code, so that no
// inline function can leak from an object compiled for one ISA into another.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pe {

constexpr int kPanel = 16;             // output rows in a panel
constexpr int kActGroup = 64;          // activations that share an int8 scale
constexpr int kSumGroup = 32;          // activations that share a sum
constexpr float kOutlierRatio = 4.0f;  // a value this many times the rest of its group is kept apart, in float
constexpr int kGemvTokens = 8;         // up to here the GEMV kernels run
constexpr int kTileTokens =
    12;                       // rows a GEMM tile may read past the last token: every activation buffer has that slack
constexpr int kKvBlock = 32;  // tokens in a KV block
constexpr int kUnpacked = 2;  // panels that linear unpacks at once, at most
constexpr int kPartition = 256;     // keys in an attention partition
constexpr int kProbeRead = 512;     // bytes that probe_read takes at a time
constexpr int kProbeSteps = 96;     // dot4 or fma in a round of probe_int8 and probe_f32, 64 or 16 multiply-adds each
constexpr int kProbeRounds = 4096;  // of one call: more could overflow the sums

// A P16 tensor in memory (docs/packed_formats.md). Panel p starts at data + p * panel_bytes.
struct Packed {
  int32_t format;  // pe_format
  int32_t group;
  int64_t rows, cols;   // N, K
  int64_t padded_cols;  // K rounded up to the step of the format
  int64_t panels, groups;
  // Inside a panel of an integer format: at 0 the units of its rows, float32 [16] for scales and, for PE_INT4_MIN, [16]
  // for minimums; then per group [16] scales (int16; PE_INT4_MIN uint8) and minimums (int8), in those units; the data.
  size_t panel_bytes, scale_offset, minimum_offset, data_offset;
  uint8_t* data;
};

// Quantized activations: T rows of int8 and, per row, the numbers of its groups.
struct QuantView {
  int8_t* q;                // [T][q_stride]; columns past K are 0
  float* scale;             // [T][groups]            value = scale * q
  float* scaled_sum64;      // [T][groups]            scale * sum over the group
  float* scaled_sum32;      // [T][2 * groups]        scale * sum over half a group
  int32_t* negative_sum64;  // [T][groups]          -sum over the group
  int32_t* negative_sum32;  // [T][2 * groups]
  float* outlier_value;     // [T][groups]            the value that is not in q (0 there), where outlier_column says so
  uint8_t* outlier_column;  // [T][outlier_stride]  its column inside the group plus 1; 0 = the group has none
  int64_t outlier_stride;   // groups rounded up to 8
  int64_t q_stride;         // bytes
  int64_t groups;           // row stride of the arrays above (twice that for the halves)
};

struct QuantizeArgs {  // columns [begin, end) of rows [row, row + rows) of `out`; begin is a multiple of 64
  const float* x;      // of the first row and column
  int64_t x_stride;    // values between rows
  int64_t begin, end;
  const QuantView* out;
  int64_t row, rows;
};

struct LinearArgs {
  const Packed* weight;
  int64_t panel_begin, panel_end;
  int64_t tokens;
  QuantView quant;  // int8 and int4 weights
  const float* x;   // f32 and bf16 weights: [T][x_stride]
  int64_t x_stride;
  const float* bias;  // [rows padded to 16] or nullptr
  float* out;         // out[t * out_stride + 16 * (panel - panel_begin) + r]; 16 columns of every panel are written
  int64_t out_stride;
  float factor;      // not 0: out += factor * result
  uint8_t* scratch;  // kUnpacked * kPanel * padded_cols bytes, for unpacked panels
};

struct AttentionArgs {
  const float* q;  // row r: q + q_offsets[r]
  const int64_t* q_offsets;
  const int32_t* key_begin;  // [rows] first and one past the last key of the row
  const int32_t* key_end;
  int32_t rows;
  int32_t k_dim, v_dim, v_stride;  // v_stride: v_dim rounded up to 16
  int32_t dtype;                   // pe_kv_dtype
  float scale;
  float softcap;     // 0: none
  int8_t* q_digits;  // scratch of attention_q for PE_KV_INT8: [rows][q_digit_stride]
  int64_t q_digit_stride;
  int32_t partition;               // keys partition * 256 ... + 255
  const uint8_t* const* k_blocks;  // of the partition's up to 8 blocks; only blocks with a wanted key are read
  const uint8_t* const* v_blocks;
  const uint8_t* const* next_k_blocks;  // what is read after this partition, or NULL; as many as there are V blocks
  float* scores;                        // [rows][256] scratch
  float* max_out;                       // [rows]
  float* sum_out;                       // [rows]
  float* acc_out;                       // [rows][v_stride], not yet divided by the sum
};

// One token's experts. The arrays have `experts` rounded up to 16 entries.
struct RouteArgs {
  float* logits;      // overwritten: scores
  float* choice;      // scratch: what experts are chosen by
  const float* bias;  // added to the scores for the choice alone, or nullptr
  int32_t experts, top_k, groups, top_groups;
  int32_t scoring, group_score, normalise;  // pe_scoring, pe_group_score
  float scale, eps;
  float* out;  // [top_k] weights, then [top_k] ids; best first
};

struct PackArgs {
  const Packed* weight;
  const void* source;    // [rows, cols]
  int32_t source_dtype;  // pe_dtype
  int64_t source_rows;
  int64_t first_row;         // of this panel, in the source
  int64_t panel;             // in the tensor
  const float* importance;   // [cols]; read by the integer formats
  float* scratch;            // float [align(cols, 8)][16], then [groups][2][16]
  int64_t bad_row, bad_col;  // out: the first NaN or Inf, else -1
};

struct KernelTable {
  const char* name;
  // y = rms_norm(x) * w over n columns; x and y may be the same
  void (*rms_norm)(const float* x, const float* w, float* y, int64_t n, float eps);
  // y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * w + b; b may be nullptr, x and y may be the same
  void (*layer_norm)(const float* x, const float* w, const float* b, float* y, int64_t n, float eps);
  void (*quantize)(const QuantizeArgs* args);
  void (*linear)(const LinearArgs* args);
  void (*dequantize)(const Packed* weight, int64_t panel, float* out);  // as a panel of PE_F32: [cols][16]
  void (*add)(const float* x, float* y, int64_t n, float factor);       // y += factor * x
  // y[16 j + i] = act(x[32 j + i]) * x[32 j + 16 + i]
  void (*act_mul)(const float* x, float* y, int64_t n, int32_t activation);
  void (*act)(const float* x, float* y, int64_t n, int32_t activation);  // n is a multiple of 16
  void (*softcap)(float* x, int64_t n, float cap);                       // x = cap * tanh(x / cap); so is n here
  // y *= sigmoid(x . w); x, w [n]; y [m]
  void (*gate)(const float* x, const float* w, int64_t n, float* y, int64_t m);
  int32_t (*route)(const RouteArgs* args);  // 0 where a logit is NaN or infinite: then the first top_k ids, weights 0
  // one head of `dim` columns, the first `rotary` rotated half-split by cos[rotary / 2] and sin[rotary / 2]
  void (*rope)(float* x, int64_t rotary, const float* cos, const float* sin);
  void (*store_k)(const float* k, uint8_t* block, int32_t slot, int32_t dim, int32_t dtype);
  void (*store_v)(const float* v, uint8_t* block, int32_t slot, int32_t dim, int32_t stride, int32_t dtype);
  void (*attention_q)(const AttentionArgs* args);  // before `attention`, once per set of rows: q as the cache needs it
  void (*attention)(const AttentionArgs* args);    // one partition
  // running (max, sum, acc) = merged with another partition's; v_stride columns
  void (*merge)(float* max, float* sum, float* acc, float other_max, float other_sum, const float* other_acc,
                int64_t n);
  void (*divide)(const float* acc, float sum, float* out, int64_t n);
  void (*gather_row)(const Packed* weight, int64_t row, float* out);
  int32_t (*argmax)(const float* x, int64_t n, float* max, int32_t* finite);  // lowest index on ties
  double (*sum_exp)(const float* x, int64_t n, float max);                    // sum of exp(x - max)
  void (*pack_panel)(PackArgs* args);
  // limits of the machine
  int32_t (*probe_read)(const uint8_t* p, int64_t bytes, bool prefetch);  // sum of the int32 there
  int32_t (*probe_int8)(int64_t rounds);
  float (*probe_f32)(int64_t rounds);
};

}  // namespace pe
