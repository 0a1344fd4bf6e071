// heads.cu and attention.cu, flat. A cache lives from attention_cache to attention_free and starts as NaN in every
// dtype.
#include "cuda/kv_layout.h"
#include "driver.h"

using namespace pe;
using namespace pe::cuda;

namespace {

struct Cache {
  pe_kv_desc desc;
  int64_t bytes;
  Array<uint8_t> pool;
  Cache(const pe_kv_desc& d, int64_t blocks) : desc(d), bytes(kv_layout(d).block_bytes * blocks), pool(bytes) {
    must(cudaMemset(pool.data(), 0xff, static_cast<size_t>(bytes)));
  }
};

}  // namespace

extern "C" {

struct Batch {
  int64_t tokens, sequences, table_width;
  const int32_t *positions, *sequence_of, *query_start, *table;
};

// What is missing stays out: rope (values nullptr), norms, the cache.
struct HeadsCase {
  int64_t heads, kv_heads, head_dim, whole_norms;
  const float *q_norm, *k_norm, *rope, *q_scales;
  int64_t rope_positions, rotary_dim;
};

}  // extern "C"

namespace {

struct DeviceBatch {
  Array<int32_t> positions, sequence_of, query_start, table;
  Step step;
  explicit DeviceBatch(const Batch& b)
      : positions(b.positions, b.tokens),
        sequence_of(b.sequence_of, b.tokens),
        query_start(b.query_start, b.sequences + 1),
        table(b.table, b.sequences * b.table_width) {
    step.positions = positions.data();
    step.sequences = sequence_of.data();
    step.query_start = query_start.data();
    step.table_width = static_cast<int32_t>(b.table_width);
  }
};

struct DeviceRope {
  Array<float> values, scales;
  Rope rope;
  explicit DeviceRope(const HeadsCase& c)
      : values(c.rope, c.rope_positions * c.rotary_dim), scales(c.q_scales, c.rope_positions) {
    rope = {values.or_null(), scales.or_null(), static_cast<int32_t>(c.rotary_dim)};
  }
};

KvView view_of(const Cache& cache, int64_t layer, const DeviceBatch& batch) {
  return kv_view(cache.desc, cache.pool.data(), static_cast<int32_t>(layer), batch.table.data());
}

}  // namespace

extern "C" {

const char* driver_error() { return last_error(); }

int attention_cache(int64_t layers, int64_t kv_heads, int64_t k_dim, int64_t v_dim, int64_t dtype, int64_t blocks,
                    int64_t* out) {
  return driven([&](Stream) {
    pe_kv_desc d{};
    d.struct_size = sizeof d;
    d.layers = static_cast<int32_t>(layers);
    d.kv_heads = static_cast<int32_t>(kv_heads);
    d.k_dim = static_cast<int32_t>(k_dim);
    d.v_dim = static_cast<int32_t>(v_dim);
    d.dtype = static_cast<int32_t>(dtype);
    *out = reinterpret_cast<int64_t>(new Cache(d, blocks));
  });
}

// The bytes of the pool: [blocks][layers][kv_heads][head_bytes].
int attention_pool(int64_t cache, uint8_t* out, int64_t* head_bytes) {
  return driven([&](Stream) {
    const Cache& kept = *reinterpret_cast<Cache*>(cache);
    *head_bytes = kv_layout(kept.desc).head_bytes;
    if (out) kept.pool.read(out);
  });
}

int attention_free(int64_t cache) {
  delete reinterpret_cast<Cache*>(cache);
  return 0;
}

// qkv [T][width], changed in place as the kernels do.
int attention_heads(int64_t cache, int64_t layer, const HeadsCase* c, float eps, float* qkv, int64_t width,
                    const Batch* batch) {
  return driven([&](Stream stream) {
    const FloatRows rows(qkv, batch->tokens, width);
    const DeviceBatch on_device(*batch);
    const DeviceRope rope(*c);
    const int64_t norm_width = c->whole_norms ? c->heads * c->head_dim : c->head_dim;
    const Array<float> q_norm(c->q_norm, norm_width),
        k_norm(c->k_norm, c->whole_norms ? c->kv_heads * c->head_dim : c->head_dim);
    FinishHeads f;
    f.heads.heads = static_cast<int32_t>(c->heads);
    f.heads.kv_heads = static_cast<int32_t>(c->kv_heads);
    f.heads.head_dim = static_cast<int32_t>(c->head_dim);
    f.heads.k_column = up(c->heads * c->head_dim, kPanel);
    f.heads.v_column = f.heads.k_column + up(c->kv_heads * c->head_dim, kPanel);
    f.qkv = rows.rows();
    f.q_norm = q_norm.or_null();
    f.k_norm = k_norm.or_null();
    f.whole_norms = c->whole_norms != 0;
    f.eps = eps;
    f.rope = c->rope ? &rope.rope : nullptr;
    KvView view;
    if (cache) view = view_of(*reinterpret_cast<Cache*>(cache), layer, on_device);
    f.kv = cache ? &view : nullptr;
    f.tokens = static_cast<int>(batch->tokens);
    finish_heads(stream, f, on_device.step);
    must(cudaStreamSynchronize(stream));
    rows.read(qkv);
  });
}

int attention_latent(int64_t cache, int64_t layer, float* x, const float* norm, float eps, const HeadsCase* c,
                     const Batch* batch) {
  return driven([&](Stream stream) {
    const Cache& kept = *reinterpret_cast<Cache*>(cache);
    const FloatRows rows(x, batch->tokens, kept.desc.k_dim);
    const DeviceBatch on_device(*batch);
    const DeviceRope rope(*c);
    const Array<float> weight(norm, kept.desc.v_dim);
    latent_append(stream, rows.rows(), weight.data(), eps, rope.rope, view_of(kept, layer, on_device), on_device.step,
                  static_cast<int>(batch->tokens));
    must(cudaStreamSynchronize(stream));
    rows.read(x);
  });
}

// q [T][heads * k_dim] -> out [T][heads * v_dim], and where `quant` is given into that, too.
int attention_run(int64_t cache, int64_t layer, int64_t heads, int64_t window, float scale, float softcap,
                  const float* q, float* out, const HostQuant* quant, int64_t max_partitions, const Batch* batch) {
  return driven([&](Stream stream) {
    const Cache& kept = *reinterpret_cast<Cache*>(cache);
    const FloatRows in(q, batch->tokens, heads * kept.desc.k_dim);
    const FloatRows to(nullptr, batch->tokens, heads * kept.desc.v_dim);
    const QuantRows quants(batch->tokens, heads * kept.desc.v_dim);
    const DeviceBatch on_device(*batch);
    Attention a;
    a.heads = static_cast<int32_t>(heads);
    a.head_dim = kept.desc.k_dim;
    a.window = static_cast<int32_t>(window);
    a.scale = scale;
    a.softcap = softcap;
    a.q = in.rows();
    a.out = to.rows();
    a.quantized = quants.rows();
    a.quantize = quant != nullptr;
    a.kv = view_of(kept, layer, on_device);
    a.tokens = static_cast<int>(batch->tokens);
    a.sequences = static_cast<int>(batch->sequences);
    a.max_partitions = static_cast<int32_t>(max_partitions);
    const auto floats = static_cast<int64_t>(attention_scratch_floats(a));
    const Array<float> partials(floats);
    must(cudaMemset(partials.data(), 0xff, static_cast<size_t>(floats) * 4));
    a.partials = partials.data();
    attention(stream, a, on_device.step);
    must(cudaStreamSynchronize(stream));
    to.read(out);
    quants.read(quant);
  });
}

}  // extern "C"
