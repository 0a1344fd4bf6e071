/* The C ABI of a pyengine backend. Plain C, no exceptions, no output; every struct starts with struct_size.
 *
 * Objects are named by small integers inside one pe_backend: tensors, rope tables, KV groups, buffers of a program.
 * Every function returns a pe_status; on anything but PE_OK, pe_last_error() gives this thread's message.
 * A backend may be used by one thread at a time; different backends are independent.
 */
#ifndef PYENGINE_H
#define PYENGINE_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define PE_API __attribute__((visibility("default")))
#else
#define PE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define PE_ABI_VERSION 3
#define PE_LAYOUT_VERSION 1 /* of tensors in memory and on disk: docs/packed_formats.md */

typedef enum pe_status {
  PE_OK = 0,
  PE_REQUEST = 1,     /* the caller's arguments are wrong */
  PE_FORMAT = 2,      /* bytes or values of a tensor are wrong (NaN, Inf) */
  PE_UNSUPPORTED = 3, /* an op, format or combination this backend lacks */
  PE_RESOURCE = 4,    /* memory, threads, missing ISA */
  PE_COMPUTE = 5,     /* NaN or Inf at run time */
  PE_CANCELLED = 6,   /* the batch's cancel flag was seen */
  PE_INTERNAL = 7
} pe_status;

typedef struct pe_backend pe_backend;
typedef struct pe_program pe_program;

/* ---- library, ISAs ------------------------------------------------------------------------------------------- */

PE_API int32_t pe_abi_version(void);
PE_API const char* pe_last_error(void);    /* of the calling thread; valid until its next call */
PE_API const char* pe_compiler(void);      /* the compiler that built the library */
PE_API const char* pe_commit(void);        /* of the sources it was built from; "" where they had no git */
PE_API int32_t pe_isa_count(void);         /* implementations compiled in, worst first */
PE_API const char* pe_isa_name(int32_t i); /* "scalar", "avx2", "neon" ...; NULL past the end */
PE_API int32_t pe_isa_available(int32_t i);
PE_API const char* pe_cpu_features(void); /* space separated */
PE_API int32_t pe_default_threads(void);  /* min(affinity, cgroup quota, physical cores), at least 1 */

/* Devices besides the CPU. 0 where there are none: pe_last_error() says why. */
PE_API int32_t pe_device_count(void);
PE_API const char* pe_device_name(int32_t i); /* as its maker calls it; NULL past the end */
PE_API pe_status pe_device_bytes(int32_t i, uint64_t* free, uint64_t* total);

typedef struct pe_backend_config {
  uint32_t struct_size;
  int32_t threads;    /* 0 = pe_default_threads(); 1..1024 */
  const char* isa;    /* NULL = the best available; else a name, which must be available */
  const char* device; /* "cpu", "cuda" (the first) or "cuda:1"; NULL = what the library was built for */
} pe_backend_config;

PE_API pe_status pe_backend_create(const pe_backend_config* config, pe_backend** out);
PE_API void pe_backend_destroy(pe_backend* backend); /* programs of it must be destroyed first */
PE_API const char* pe_backend_isa(const pe_backend* backend);
PE_API int32_t pe_backend_threads(const pe_backend* backend);
PE_API const char* pe_backend_device(const pe_backend* backend); /* "cpu", "cuda:0" */

/* ---- limits: what the machine can do with this backend's threads and ISA -------------------------------------------
 */

typedef enum pe_limit {
  PE_LIMIT_READ = 0, /* bytes read from memory, each thread its own part of a buffer made for it */
  PE_LIMIT_INT8,     /* operations of int8 dot products in registers; a multiply-add is two */
  PE_LIMIT_F32,      /* the same with float32 */
  PE_LIMIT_HOP, /* a cache line handed from thread to thread in a ring; PE_UNSUPPORTED with one thread, on a device */
  PE_LIMIT_COUNT
} pe_limit;

typedef struct pe_limit_args {
  uint32_t struct_size;
  int32_t limit; /* pe_limit */
  int64_t
      work; /* of a pass, all threads together, rounded up: bytes or hops (up to 2^32), or operations (up to 2^48) */
  int32_t passes;     /* 1..10000 */
  double* per_second; /* [passes]: bytes, operations or hops per second of each pass */
} pe_limit_args;

PE_API pe_status pe_limit_measure(pe_backend* backend, const pe_limit_args* args);
/* Tensors and KV blocks leave every cache: what runs next is timed reading memory. */
PE_API pe_status pe_flush_caches(pe_backend* backend);

/* ---- tensors: packed weights, embeddings, vectors --------------------------------------------------------------- */

typedef enum pe_format {
  PE_F32 = 0,       /* P16 float32 */
  PE_BF16 = 1,      /* P16 bfloat16 */
  PE_INT8 = 2,      /* P16 int8, symmetric; scales 16 bits per group, in units of the row */
  PE_INT4_SYM = 3,  /* P16 int4, q - 8; scales as for int8 */
  PE_INT4_MIN = 4,  /* P16 int4, scale * q + minimum: 8 bits each per group, in units of the row */
  PE_ROWS_F32 = 5,  /* row-major float32 (embedding) */
  PE_ROWS_BF16 = 6, /* row-major bfloat16 (embedding) */
  PE_VECTOR_F32 = 7 /* one row of float32: norm weights, biases, masks */
} pe_format;

typedef enum pe_dtype { PE_SRC_F32 = 0, PE_SRC_BF16 = 1, PE_SRC_F16 = 2 } pe_dtype;

typedef struct pe_tensor_desc {
  uint32_t struct_size;
  int32_t format; /* pe_format */
  int64_t rows;   /* N, output features; 1 for PE_VECTOR_F32 */
  int64_t cols;   /* K, input features */
  int32_t group;  /* 32, 64 or 128 for int4, 64 for int8, 0 otherwise */
} pe_tensor_desc;

typedef struct pe_pack_args {
  uint32_t struct_size;
  int32_t source_dtype; /* pe_dtype */
  const void* source;   /* [rows, K], row-major, any alignment */
  int64_t rows;
  int64_t panel_offset;    /* source rows 16 i .. 16 i + 15 become panel panel_offset + i * panel_stride */
  int64_t panel_stride;    /* (row offset and stride 1 for PE_ROWS and PE_VECTOR) */
  const float* importance; /* [K] weight of each input channel's squared error, or NULL for 1 */
} pe_pack_args;

PE_API pe_status pe_tensor_create(pe_backend* backend, const pe_tensor_desc* desc, int32_t* id); /* zero filled */
PE_API pe_status pe_tensor_pack(pe_backend* backend, int32_t id, const pe_pack_args* args); /* PE_FORMAT on NaN/Inf */
/* The host's memory, header included. A CUDA program sees what was packed since its last run, and what was written
 * through `data` between this call and its next run. */
PE_API pe_status pe_tensor_data(pe_backend* backend, int32_t id, void** data, size_t* bytes);
PE_API pe_status pe_tensor_dequantize(pe_backend* backend, int32_t id, float* out); /* [rows, K] */
PE_API pe_status pe_tensor_free(pe_backend* backend, int32_t id);
/* Moves tensors of less than 16 MiB side by side into memory of their own, in huge pages where there are any: a tensor
 * alone gets those from 2 MiB on. Mapped tensors stay. What `data` gave of them is no longer theirs. */
PE_API pe_status pe_tensors_gather(pe_backend* backend, const int32_t* ids, int32_t count);

/* Tensors in a file, one behind the other, headers with checksums included. Offsets are multiples of 64. */
typedef struct pe_tensor_file {
  uint32_t struct_size;
  int32_t fd;      /* open; still the caller's */
  uint64_t offset; /* of the first tensor */
  int32_t count;
  int32_t* ids;                /* [count]: the tensors to write, or those that were mapped */
  const pe_tensor_desc* descs; /* [count], to map: what is expected; NULL to write */
} pe_tensor_file;

/* `bytes` is set to what was written. PE_RESOURCE where the file takes no more. */
PE_API pe_status pe_tensors_write(pe_backend* backend, const pe_tensor_file* file, uint64_t* bytes);
/* Read-only tensors in the file's own pages, until they are freed; all checksums are verified, on the backend's
 * threads. PE_FORMAT where the file is short, unreadable, or not what was written; then no tensor is made. */
PE_API pe_status pe_tensors_map(pe_backend* backend, const pe_tensor_file* file);
/* The checksum of a multiple of 64 bytes. */
PE_API pe_status pe_checksum(const void* data, size_t bytes, uint64_t* sum);

/* ---- rope tables and KV cache ------------------------------------------------------------------------------------ */

/* table [positions, rotary_dim]: cos of the rotary_dim / 2 pairs, then sin. q_scale [positions] or NULL: what rotated
 * query heads are then multiplied by. Copied. id < 0 on entry makes a new one. */
PE_API pe_status pe_rope_set(pe_backend* backend, int32_t* id, const float* table, int64_t positions,
                             int32_t rotary_dim, const float* q_scale);

#define PE_KV_BLOCK 32 /* tokens in a block */

typedef enum pe_kv_dtype {
  PE_KV_F32 = 0,
  PE_KV_BF16 = 1,
  PE_KV_INT8 = 2 /* symmetric, one float32 scale per token and head, for K and for V */
} pe_kv_dtype;

typedef struct pe_kv_desc {
  uint32_t struct_size;
  int32_t layers, kv_heads, k_dim, v_dim;
  int32_t dtype; /* pe_kv_dtype */
} pe_kv_desc;

PE_API pe_status pe_kv_create(pe_backend* backend, const pe_kv_desc* desc, int32_t* group);
PE_API pe_status pe_kv_reserve(pe_backend* backend, int32_t group, int32_t blocks); /* grow to this many blocks */
PE_API pe_status pe_kv_block_bytes(pe_backend* backend, int32_t group, size_t* bytes);

/* ---- programs ---------------------------------------------------------------------------------------------------- */

typedef enum pe_stage {
  PE_STAGE_EMBED = 0,
  PE_STAGE_NORM,
  PE_STAGE_ATTENTION,
  PE_STAGE_ROUTER,
  PE_STAGE_FFN,
  PE_STAGE_LM_HEAD,
  PE_STAGE_SAMPLE,
  PE_STAGE_COUNT
} pe_stage;

typedef enum pe_op_kind {
  /* plain ops; [T, ...] are buffers, T = tokens of the batch */
  PE_OP_EMBED = 0,     /* output = scale * weight[token_ids] (+ weight2[positions]) */
  PE_OP_LOAD_HIDDEN,   /* output = batch.hidden */
  PE_OP_NORM,          /* output = norm(input) * norm (+ norm_bias), of norm_kind */
  PE_OP_QUANTIZE,      /* output(int8) = quantize(input) */
  PE_OP_LINEAR,        /* output = input . weight^T (+ bias) */
  PE_OP_QK_NORM,       /* output = input with the heads of q and k normalised by norm and norm2, or (where these are as
                          wide) all of q and all of k; in = [q | k | v] */
  PE_OP_ROPE,          /* output = input with q and k heads rotated; in = [q | k | v] */
  PE_OP_KV_APPEND,     /* cache = k, v of input [q | k | v] */
  PE_OP_ATTENTION,     /* output = softmax(cap(q . K * scale)) . V; q = first heads * head_dim columns of input;
                          cap(s) = softcap * tanh(s / softcap) where softcap is not 0; head_dim = k_dim of the cache,
                          output = heads * v_dim */
  PE_OP_ADD,           /* output += scale * input */
  PE_OP_ACT_MUL,       /* output = activation(gate) * up; input is interleaved by 16: gate0 up0 gate1 up1 ... */
  PE_OP_ACT,           /* output = activation(input) */
  PE_OP_MASK_COLUMNS,  /* output = norm[column] != 0 ? output : 0 */
  PE_OP_HEAD_LINEAR,   /* output head h = [weight rows of head h . first columns of input head h | its rest, rotated];
                          head_dim: of the input; the weight is float, each head's rows from a panel border */
  PE_OP_LATENT_APPEND, /* in place, input = [latent | key]: latent normed by norm, key rotated; cache: K = both, V =
                          the latent */
  PE_OP_TAP,           /* batch.taps[head_dim] = input; rows of experts in the order of (token, slot) */
  PE_OP_DEQUANTIZE,    /* weight2 (PE_F32, not mapped) = weight; a baseline: no other op writes a tensor. On a device
                          its copy there, not the host's */
  PE_OP_ROUTER,      /* output = [top_k weights | top_k expert ids] of scores(input . weight^T), bias = selection bias;
                        scratch [T, experts]. Experts are chosen by score + bias, ties to the lower id */
  PE_OP_MOE_GATE_UP, /* output [top_k rows a token] = ACT_MUL of LINEAR(weight) of each token's experts */
  PE_OP_MOE_DOWN,    /* output = sum over slots of routing weight * (input row . weight2^T), slots ascending */
  PE_OP_GATE,        /* output *= sigmoid(input . norm), one number a token */
  /* fused ops */
  PE_OP_NORM_QUANTIZE,      /* NORM, QUANTIZE */
  PE_OP_QKV_ROPE_APPEND,    /* LINEAR, QK_NORM?, ROPE?, KV_APPEND; output = [q | k | v] */
  PE_OP_ATTENTION_QUANTIZE, /* ATTENTION, QUANTIZE */
  PE_OP_LINEAR_RESIDUAL,    /* LINEAR, ADD */
  PE_OP_NORM_RESIDUAL,      /* NORM, ADD */
  PE_OP_GATED_FFN,          /* LINEAR(weight), ACT_MUL, QUANTIZE, LINEAR(weight2) */
  PE_OP_GATED_FFN_RESIDUAL, /* GATED_FFN, ADD */
  PE_OP_FFN,                /* LINEAR(weight), ACT, QUANTIZE, LINEAR(weight2) */
  PE_OP_FFN_RESIDUAL,       /* FFN, ADD */
  PE_OP_MOE_FFN_RESIDUAL,   /* MOE_GATE_UP, QUANTIZE, MOE_DOWN, ADD */
  /* ends of a program */
  PE_OP_LM_HEAD, /* logits[r] = cap(NORM(input[logits_rows[r]]) . weight^T), as in ATTENTION */
  PE_OP_SAMPLE,  /* sampled[r] from logits[r] */
  PE_OP_COUNT
} pe_op_kind;

/* x / sqrt(mean(x^2) + eps), or of x - mean(x) */
typedef enum pe_norm { PE_RMS_NORM = 0, PE_LAYER_NORM = 1 } pe_norm;

typedef enum pe_activation {
  PE_SILU = 0,
  PE_GELU_TANH = 1,
  PE_GELU = 2, /* with erf */
  PE_RELU = 3
} pe_activation;

typedef enum pe_scoring { PE_SOFTMAX = 0, PE_SIGMOID = 1 } pe_scoring;                  /* of all experts' logits */
typedef enum pe_group_score { PE_GROUP_MAX = 0, PE_GROUP_TOP2_SUM = 1 } pe_group_score; /* of score + bias */

/* Ids that an op does not use are -1. Buffers: input, output, scratch, routing (a router's output), rows (top_k float32
 * rows a token, as wide as the hidden state). Tensors: weight, weight2, bias, bias2, norm, norm2, norm_bias. Experts'
 * tensors stand one behind the other, each from a panel border: gate and up interleaved as for ACT_MUL. */
typedef struct pe_op {
  uint32_t struct_size;
  int32_t kind, stage, layer;
  int32_t input, output, scratch, routing, rows;
  int32_t weight, weight2, bias, bias2, norm, norm2, norm_bias;
  int32_t rope, kv_group, kv_layer;
  int32_t heads, kv_heads, head_dim, window; /* window 0 = all keys */
  int32_t activation, norm_kind;
  int32_t experts, top_k;       /* a router's choice: pe_scoring, then the top_groups best of `groups` groups of */
  int32_t groups, top_groups;   /* experts (1 of 1: all), then the top_k best experts of those */
  int32_t scoring, group_score; /* pe_scoring, pe_group_score */
  int32_t normalise;            /* 1: weights are divided by (their sum + eps); then all are multiplied by `scale` */
  float eps, softcap;
  float scale; /* scale: of embed, add and the ops that end in an add, 0 counts as 1 */
} pe_op;

typedef struct pe_buffer_desc {
  uint32_t struct_size;
  int32_t quantized; /* 0: float32 [T, width]; 1: int8 in groups of 64 with scales and sums */
  int64_t width;
  int32_t rows; /* a token; 0 means 1. More: rows of experts, which only their ops, QUANTIZE and TAP take */
} pe_buffer_desc;

typedef struct pe_program_desc {
  uint32_t struct_size;
  int32_t op_count, buffer_count;
  const pe_op* ops;
  const pe_buffer_desc* buffers;
  int32_t max_batch_tokens; /* T never exceeds it */
  int32_t max_sequences;    /* rows that can be sampled in one run, sequences in a batch */
  int32_t timed;            /* 1: stamp the clock after every op */
} pe_program_desc;

typedef struct pe_sampling {
  uint32_t struct_size;
  float temperature, top_p, min_p, repetition_penalty; /* temperature 0 = greedy */
  int32_t top_k;                                       /* 0 = off */
  uint64_t seed, step;                                 /* the random key: Philox4x32-10 of (seed, step) */
  const int32_t* bias_ids;                             /* 1: each id's logit += bias, finite or -inf */
  const float* bias_values;
  int32_t bias_count;
  const int32_t* penalty_ids;    /* each id once */
  const int32_t* penalty_counts; /* [penalty_count] how often each was generated, or NULL: never */
  int32_t penalty_count;
  /* 2: repetition_penalty divides each penalty id's logit above 0 and multiplies others; 3: logit -= count *
   * frequency_penalty; 4: logit -= presence_penalty where count is not 0; 5: temperature */
  float frequency_penalty, presence_penalty;
} pe_sampling;

/* A ragged batch. Sequence s owns tokens query_start[s] .. query_start[s + 1] - 1 at consecutive positions. */
typedef struct pe_batch {
  uint32_t struct_size;
  int32_t tokens, sequences;
  const int32_t* token_ids;           /* [tokens] */
  const int32_t* positions;           /* [tokens] */
  const int32_t* query_start;         /* [sequences + 1] */
  const int32_t* const* block_tables; /* per KV group: [sequences, block_table_width] */
  int32_t block_table_width;
  int32_t logits_count;
  const int32_t* logits_rows;     /* [logits_count], token indices */
  float* logits;                  /* [logits_count, V] or NULL */
  const pe_sampling* sampling;    /* [logits_count] or NULL: greedy */
  int32_t* sampled;               /* [logits_count] or NULL */
  float* sampled_logprob;         /* [logits_count] or NULL: log softmax of the untouched logits at the sampled id */
  const int32_t* targets;         /* [logits_count] or NULL, with `sampled`: ids, or -1 for none */
  float* target_logprob;          /* [logits_count]: the same at the target; not written for none */
  int32_t top_count;              /* 0, or with `sampled`: the most likely ids of the untouched logits, best first, */
  int32_t* top_ids;               /* [logits_count, top_count]: lower id first on ties, */
  float* top_logprob;             /* [logits_count, top_count]: and the same at each */
  const float* hidden;            /* [tokens, width] for PE_OP_LOAD_HIDDEN */
  float* const* taps;             /* tap i: [tokens, width of its buffer] */
  const volatile int32_t* cancel; /* NULL or a flag that another thread may set */
} pe_batch;

PE_API pe_status pe_program_create(pe_backend* backend, const pe_program_desc* desc, pe_program** out);
PE_API pe_status pe_program_run(pe_program* program, const pe_batch* batch);
/* Nanoseconds per op, summed since the last reset, and the number and total of the runs. Any pointer may be NULL.
 * On a CUDA device ops are timed in every 16th run of a batch's shape of up to 8 tokens, and in every larger run; what
 * a run took on the host's clock is shared out among the ops as last timed, so that their sum is that of the runs. */
PE_API pe_status pe_program_times(pe_program* program, uint64_t* op_ns, uint64_t* runs, uint64_t* run_ns,
                                  int32_t reset);
/* Tokens that every expert of every router was chosen for since the last reset, router by router: [sum of experts].
 * `count` is that number. Either pointer may be NULL. */
PE_API pe_status pe_program_routing(pe_program* program, uint64_t* tokens, int64_t* count, int32_t reset);
PE_API pe_status pe_program_info(pe_program* program, size_t* arena_bytes, uint64_t* barriers, uint64_t* allocations);
PE_API void pe_program_destroy(pe_program* program);

#ifdef __cplusplus
}
#endif
#endif
