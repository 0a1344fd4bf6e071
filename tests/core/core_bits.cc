// Every op on every ISA of this CPU against the scalar kernels, through the C ABI: equal bits, or exit status 1.
//
//   core_bits [--few] [NAME ...]     the ISAs that this CPU must be found to have; without names, whichever it has
//
// --few: some of the sizes of linears and of the formats of decoders, for builds that are slow.
//
// It needs nothing but the library, so it runs where there is no Python, as under an emulator. The scalar results come
// from one thread, the others from three; outputs of a batch are also compared with those of its first rows alone.
#include <algorithm>
#include <functional>

#include "core_bits_experts.h"
#include "core_bits_latent.h"

namespace {

bool few = false;

void linears(Client& c, Recorder& out) {
  constexpr int64_t kSizes[][2] = {{1, 1440}, {15, 172}, {16, 1},  {17, 2},   {31, 15},  {32, 16}, {33, 17},
                                   {63, 31},  {64, 32},  {65, 33}, {129, 65}, {40, 576}, {96, 127}};
  constexpr int32_t kTokens = 29;  // whole GEMM tiles and a rest, whatever the tile
  for (const Format& f : kFormats)
    for (const auto& [rows, cols] : kSizes) {
      if (few && rows % 4 != 1) continue;
      const std::string what = std::string(f.name) + " " + std::to_string(rows) + " x " + std::to_string(cols);
      Random random(static_cast<uint64_t>(rows * 10007 + cols));
      const int32_t weight = c.matrix(f, rows, cols, random);
      const int32_t bias = c.vector(random.normal(rows), static_cast<size_t>(up16(rows)));
      out.add(what + " packed", c.bytes(weight));
      std::vector<float> values(static_cast<size_t>(rows * cols));
      good(pe_tensor_dequantize(c.backend, weight, values.data()));
      out.add(what + " dequantized", values);
      if (f.format != PE_F32) {
        const int32_t copy = c.tensor(PE_F32, rows, cols, 0);
        pe_op op = make_op(PE_OP_DEQUANTIZE, -1, -1);
        op.weight = weight;
        op.weight2 = copy;
        run_hidden(c.program({op, make_op(PE_OP_LOAD_HIDDEN, -1, 0), make_op(PE_OP_TAP, 0, -1)}, {make_buffer(1)}, 1),
                   {0.0f}, 1, 1);
        out.add(what + " as float32", c.bytes(copy));
      }
      const std::vector<float> x = activations(kTokens, cols, random);
      pe_program* program = linear_program(c, f, weight, bias, rows, cols, kTokens);
      const std::vector<float> all = run_hidden(program, x, kTokens, rows);
      out.add(what, all);
      for (int32_t m = 1; m <= 13; ++m) {
        const std::vector<float> few = run_hidden(program, x, m, rows);
        if (std::memcmp(few.data(), all.data(), few.size() * 4) == 0) continue;
        std::fprintf(stderr, "%s: %s: the first %d of %d tokens differ\n", pe_backend_isa(c.backend), what.c_str(), m,
                     kTokens);
        ++failures;
        break;
      }
    }
}

// All stored bytes at an end of their range, activations +-127: nothing may saturate.
void extremes(Client& c, Recorder& out) {
  constexpr int64_t kRows = 16, kCols = 256;
  for (const Format& f : kFormats) {
    if (!f.integer()) continue;
    for (const int byte : {0, 1, 255}) {
      Random random(3);
      const int32_t weight = c.matrix(f, kRows, kCols, random);
      void* data;
      size_t size;
      good(pe_tensor_data(c.backend, weight, &data, &size));
      const size_t stored = kRows * kCols / (f.format == PE_INT8 ? 1 : 2);
      std::memset(static_cast<uint8_t*>(data) + size - stored, byte, stored);
      std::vector<float> x(12 * kCols);
      for (size_t i = 0; i < x.size(); ++i) x[i] = i / kCols % 3 == 0 || (i / kCols % 3 == 1) == (i % 3 == 0) ? 3 : -3;
      pe_program* program = linear_program(c, f, weight, -1, kRows, kCols, 12);
      const std::string what = std::string(f.name) + " bytes " + std::to_string(byte);
      out.add(what + ", 12 tokens", run_hidden(program, x, 12, kRows));
      out.add(what + ", 3 tokens", run_hidden(program, x, 3, kRows));
    }
  }
}

struct Shape {
  const char* name;
  int32_t heads, kv_heads, dim, rotary, window;
  bool bf16_cache;
  int32_t activation;
  bool gated = true;
  int32_t norm_kind = PE_RMS_NORM;
  bool norm_after = false;   // of both branches
  bool whole_norms = false;  // q and k are normalized over all heads
  float softcap = 0.0f;
};

constexpr Shape kShapes[] = {
    {"grouped heads", 6, 2, 16, 16, 0, true, PE_SILU},
    {"window", 3, 1, 32, 32, 40, false, PE_GELU_TANH},
    {"odd heads", 7, 1, 20, 12, 0, true, PE_GELU_TANH},
    {"wide heads", 2, 2, 72, 68, 100, false, PE_SILU},
    {"norms after, softcaps", 4, 2, 16, 16, 40, true, PE_GELU_TANH, true, PE_RMS_NORM, true, false, 1.5f},
    {"q and k whole", 3, 1, 32, 32, 0, false, PE_RELU, true, PE_RMS_NORM, true, true},
    {"layer norms, plain FFN", 2, 2, 16, 16, 0, true, PE_GELU, false, PE_LAYER_NORM},
    {"plain FFN, norms after", 3, 3, 20, 20, 0, false, PE_RELU, false, PE_LAYER_NORM, true, true, 2.0f},
};

// One block of a decoder with every op, from token ids to sampled ids; fused where the fused ops take the shape.
pe_program* decoder(Client& c, const Format& f, const Shape& s, bool fused, Recorder& out, int32_t* kv_group) {
  Random random(static_cast<uint64_t>(s.heads * 100 + s.dim));
  const int64_t k_column = up16(s.heads * s.dim), v_column = k_column + up16(s.kv_heads * s.dim);
  const int64_t joined = v_column + s.kv_heads * s.dim, width = s.heads * s.dim;
  const auto norm = [&](int64_t n) { return c.vector(random.normal(n)); };

  const int32_t qkv = c.tensor(f.format, joined, kHidden, f.group);
  c.pack(qkv, random.normal(width * kHidden), width);
  c.pack(qkv, random.normal(s.kv_heads * s.dim * kHidden), s.kv_heads * s.dim, k_column / 16);
  c.pack(qkv, random.normal(s.kv_heads * s.dim * kHidden), s.kv_heads * s.dim, v_column / 16);
  const int32_t bias = c.vector(random.normal(joined), static_cast<size_t>(up16(joined)));
  const int32_t o = c.matrix(f, kHidden, width, random);
  const int64_t sides = s.gated ? 2 : 1;
  const int32_t gate_up = c.tensor(f.format, s.gated ? 2 * up16(kInter) : kInter, kHidden, f.group);
  for (int64_t side = 0; side < sides; ++side) c.pack(gate_up, random.normal(kInter * kHidden), kInter, side, sides);
  const int32_t norm_bias = s.norm_kind == PE_LAYER_NORM ? norm(kHidden) : -1;
  const int32_t down = c.matrix(f, kHidden, kInter, random), head = c.matrix(f, kVocab, kHidden, random);
  out.add("gate and up packed", c.bytes(gate_up));

  std::vector<float> angles(static_cast<size_t>(kBlocks * PE_KV_BLOCK * s.rotary));
  for (float& x : angles) x = static_cast<float>(random.bits() >> 40) * (2.0f / 16777216.0f) - 1.0f;
  int32_t rope = -1;
  const std::vector<float> q_scale(kBlocks * PE_KV_BLOCK, 1.25f);
  good(pe_rope_set(c.backend, &rope, angles.data(), kBlocks * PE_KV_BLOCK, s.rotary, q_scale.data()));
  auto kv = sized<pe_kv_desc>();
  kv.layers = 1;
  kv.kv_heads = s.kv_heads;
  kv.k_dim = kv.v_dim = s.dim;
  kv.dtype = s.bf16_cache ? PE_SRC_BF16 : PE_SRC_F32;
  good(pe_kv_create(c.backend, &kv, kv_group));
  good(pe_kv_reserve(c.backend, *kv_group, 2 * kBlocks));

  enum : int32_t { kX, kNorm, kNormQ, kJoined, kAttended, kAttendedQ, kBranch, kGateUp, kAct, kActQ };
  const std::vector<pe_buffer_desc> buffers{
      make_buffer(kHidden),       make_buffer(kHidden),
      make_buffer(kHidden, true), make_buffer(joined),
      make_buffer(width),         make_buffer(width, true),
      make_buffer(kHidden),       make_buffer(s.gated ? 2 * up16(kInter) : kInter),
      make_buffer(kInter),        make_buffer(kInter, true)};
  std::vector<pe_op> ops;
  const auto emit = [&](int32_t kind, int32_t input, int32_t output) -> pe_op& {
    pe_op op = make_op(kind, input, output);
    op.heads = s.heads;
    op.kv_heads = s.kv_heads;
    op.head_dim = kind == PE_OP_TAP ? 0 : s.dim;
    op.window = s.window;
    op.scale = 0.25f;
    op.activation = s.activation;
    op.norm_kind = s.norm_kind;
    op.softcap = s.softcap;
    op.rope = rope;
    op.kv_group = *kv_group;
    op.kv_layer = 0;
    ops.push_back(op);
    return ops.back();
  };
  const bool q = f.integer();
  const auto quantize = [&](int32_t input, int32_t output) {
    if (q) emit(PE_OP_QUANTIZE, input, output);
    return q ? output : input;
  };
  const auto emit_norm = [&](int32_t kind, int32_t input, int32_t output, int32_t weight) {
    pe_op& op = emit(kind, input, output);
    op.norm = weight;
    op.norm_bias = norm_bias;
  };
  const auto normed = [&](int32_t weight) {
    if (fused && q) {
      emit_norm(PE_OP_NORM_QUANTIZE, kX, kNormQ, weight);
      return static_cast<int32_t>(kNormQ);
    }
    emit_norm(PE_OP_NORM, kX, kNorm, weight);
    return quantize(kNorm, kNormQ);
  };
  const auto add_branch = [&](int32_t weight) {  // of its norm, where one stands after it
    if (s.norm_after && fused) return emit_norm(PE_OP_NORM_RESIDUAL, kBranch, kX, weight);
    if (s.norm_after) emit_norm(PE_OP_NORM, kBranch, kBranch, weight);
    emit(PE_OP_ADD, kBranch, kX);
  };
  const auto residual = [&](int32_t input, int32_t weight, int32_t norm_weight) {
    if (fused && !s.norm_after) {
      emit(PE_OP_LINEAR_RESIDUAL, input, kX).weight = weight;
      return;
    }
    emit(PE_OP_LINEAR, input, kBranch).weight = weight;
    add_branch(norm_weight);
  };

  emit(PE_OP_EMBED, -1, kX).weight = head;
  const int32_t q_norm = norm(s.whole_norms ? width : s.dim);
  const int32_t k_norm = norm(s.whole_norms ? s.kv_heads * s.dim : s.dim), in = normed(norm(kHidden));
  const int32_t attention_norm = norm(kHidden), ffn_norm = norm(kHidden);  // after the branches
  if (fused && s.dim % 16 == 0) {
    pe_op& op = emit(PE_OP_QKV_ROPE_APPEND, in, kJoined);
    op.weight = qkv;
    op.bias = bias;
    op.norm = q_norm;
    op.norm2 = k_norm;
  } else {
    pe_op& linear = emit(PE_OP_LINEAR, in, kJoined);
    linear.weight = qkv;
    linear.bias = bias;
    pe_op& qk = emit(PE_OP_QK_NORM, kJoined, -1);
    qk.norm = q_norm;
    qk.norm2 = k_norm;
    emit(PE_OP_ROPE, kJoined, -1);
    emit(PE_OP_KV_APPEND, kJoined, -1);
  }
  int32_t attended = kAttended;
  if (fused && q) {
    emit(PE_OP_ATTENTION_QUANTIZE, kJoined, kAttendedQ).scratch = kAttended;
    attended = kAttendedQ;
  } else {
    emit(PE_OP_ATTENTION, kJoined, kAttended);
    attended = quantize(kAttended, kAttendedQ);
  }
  residual(attended, o, attention_norm);
  const int32_t ffn_in = normed(norm(kHidden));
  std::vector<float> mask(kHidden, 1.0f);
  mask[5] = mask[kHidden - 1] = 0.0f;
  const int32_t mask_tensor = c.vector(mask);
  if (fused) {
    const int32_t alone = s.gated ? PE_OP_GATED_FFN : PE_OP_FFN;
    const int32_t added = s.gated ? PE_OP_GATED_FFN_RESIDUAL : PE_OP_FFN_RESIDUAL;
    pe_op& op = emit(s.norm_after ? alone : added, ffn_in, s.norm_after ? kBranch : kX);
    op.weight = gate_up;
    op.weight2 = down;
    op.scratch = q ? kActQ : kAct;
    if (s.norm_after) add_branch(ffn_norm);
  } else {
    emit(PE_OP_LINEAR, ffn_in, kGateUp).weight = gate_up;
    emit(s.gated ? PE_OP_ACT_MUL : PE_OP_ACT, kGateUp, kAct);
    residual(quantize(kAct, kActQ), down, ffn_norm);
  }
  emit(PE_OP_MASK_COLUMNS, -1, kX).norm = mask_tensor;
  emit(PE_OP_TAP, kX, -1);
  pe_op& last = emit(PE_OP_LM_HEAD, kX, -1);
  last.weight = head;
  last.norm = norm(kHidden);
  last.norm_bias = norm_bias;
  emit(PE_OP_SAMPLE, -1, -1);
  return c.program(ops, buffers, kMaxTokens);
}

// Appends counts[s] tokens to each of two sequences and records hidden state, logits, sampled ids and log
// probabilities.
void step(pe_program* program, const std::string& what, std::vector<int32_t>& lengths, const int32_t (&counts)[2],
          Random& random, std::vector<Output>& outputs) {
  std::vector<int32_t> ids, positions, start{0}, table(2 * kBlocks), rows;
  for (size_t s = 0; s < 2; ++s) {
    for (int32_t i = 0; i < counts[s]; ++i) {
      ids.push_back(static_cast<int32_t>(random.bits() % kVocab));
      positions.push_back(lengths[s]++);
    }
    start.push_back(static_cast<int32_t>(ids.size()));
    rows.push_back(start.back() - 1);
  }
  for (int32_t i = 0; i < 2 * kBlocks; ++i) table[static_cast<size_t>(i)] = 2 * kBlocks - 1 - i;
  std::vector<const int32_t*> tables(8, table.data());  // one for each KV group there may be
  std::vector<float> hidden(ids.size() * kHidden), logits(2 * kVocab), logprob(2);
  std::vector<int32_t> sampled(2);
  std::vector<pe_sampling> sampling(2, sized<pe_sampling>());
  const int32_t penalized[] = {3, 17, 60}, generated[] = {0, 2, 1}, targets[] = {5, 60};
  const int32_t biased[] = {4, 9};
  const float bias[] = {1.5f, -__builtin_inff()};
  constexpr int32_t kTop = 3;
  std::vector<float> target_logprob(2), top_logprob(2 * kTop);
  std::vector<int32_t> top(2 * kTop);
  for (size_t r = 0; r < 2; ++r) {
    pe_sampling& p = sampling[r];
    p.temperature = r ? 1.5f : 0.0f;
    p.top_p = 0.95f;
    p.min_p = 0.001f;
    p.repetition_penalty = 1.2f;
    p.top_k = 40;
    p.seed = 11;
    p.step = static_cast<uint64_t>(lengths[r]);
    p.penalty_ids = penalized;
    p.penalty_counts = generated;
    p.penalty_count = 3;
    p.frequency_penalty = 0.5f;
    p.presence_penalty = 0.25f;
    p.bias_ids = biased;
    p.bias_values = bias;
    p.bias_count = 2;
  }
  float* taps[] = {hidden.data()};
  auto batch = sized<pe_batch>();
  batch.tokens = static_cast<int32_t>(ids.size());
  batch.sequences = 2;
  batch.token_ids = ids.data();
  batch.positions = positions.data();
  batch.query_start = start.data();
  batch.block_tables = tables.data();
  batch.block_table_width = kBlocks;
  batch.logits_count = 2;
  batch.logits_rows = rows.data();
  batch.logits = logits.data();
  batch.sampling = sampling.data();
  batch.sampled = sampled.data();
  batch.sampled_logprob = logprob.data();
  batch.targets = targets;
  batch.target_logprob = target_logprob.data();
  batch.top_count = kTop;
  batch.top_ids = top.data();
  batch.top_logprob = top_logprob.data();
  batch.taps = taps;
  good(pe_program_run(program, &batch));
  Recorder out(outputs);
  out.add(what + " hidden", hidden);
  out.add(what + " logits", logits);
  out.add(what + " sampled", sampled);
  out.add(what + " logprob", logprob);
  out.add(what + " target logprob", target_logprob);
  out.add(what + " top", top);
  out.add(what + " top logprob", top_logprob);
}

void decoders(const char* isa, int32_t threads, std::vector<Output>& outputs) {
  for (const Format& f : kFormats)
    for (const Shape& s : kShapes) {
      if (few && (&f - kFormats) % 4 != 0) continue;
      std::vector<Output> forms[2];
      for (const bool fused : {false, true}) {
        Client c(isa, threads);
        std::vector<Output>& to = forms[fused];
        Recorder out(to);
        int32_t kv_group = -1;
        pe_program* program = decoder(c, f, s, fused, out, &kv_group);
        Random random(5);
        std::vector<int32_t> lengths{0, 0};
        const std::string what = std::string(f.name) + ", " + s.name;
        step(program, what + ", prefill", lengths, {30, 2}, random, to);
        step(program, what + ", decode", lengths, {1, 1}, random, to);
        step(program, what + ", a long chunk", lengths, {250, 5}, random, to);
        step(program, what + ", decode over two partitions", lengths, {1, 1}, random, to);
      }
      for (size_t i = 0; i < forms[0].size(); ++i) {
        if (forms[0][i].bytes == forms[1][i].bytes) continue;
        std::fprintf(stderr, "%s: %s: fused and unfused differ\n", isa, forms[0][i].what.c_str());
        ++failures;
      }
      outputs.insert(outputs.end(), forms[0].begin(), forms[0].end());
    }
}

void latents(const char* isa, int32_t threads, std::vector<Output>& outputs) {
  for (const bool bf16 : {false, true}) {
    Client c(isa, threads);
    int32_t kv_group = -1;
    pe_program* program = latent(c, bf16, &kv_group);
    Random random(5);
    std::vector<int32_t> lengths{0, 0};
    const std::string what = bf16 ? "latent bf16" : "latent f32";
    step(program, what + ", prefill", lengths, {40, 17}, random, outputs);
    step(program, what + ", decode", lengths, {1, 1}, random, outputs);
    step(program, what + ", a long chunk", lengths, {250, 5}, random, outputs);
    step(program, what + ", decode over two partitions", lengths, {1, 1}, random, outputs);
  }
}

std::vector<Output> run_all(const char* isa, int32_t threads) {
  std::vector<Output> outputs;
  Recorder out(outputs);
  {
    Client c(isa, threads);
    linears(c, out);
    extremes(c, out);
    experts(c, out);
  }
  decoders(isa, threads, outputs);
  latents(isa, threads, outputs);
  return outputs;
}

void compare(const std::string& isa, const std::vector<Output>& got, const std::vector<Output>& expected) {
  size_t bytes = 0, different = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    bytes += expected[i].bytes.size();
    if (i < got.size() && got[i].bytes == expected[i].bytes) continue;
    if (different++ == 0) std::fprintf(stderr, "%s: %s differs from scalar\n", isa.c_str(), expected[i].what.c_str());
  }
  std::printf("%s: %zu of %zu outputs (%zu bytes) have the bits of scalar\n", isa.c_str(), expected.size() - different,
              expected.size(), bytes);
  failures += different != 0 || got.size() != expected.size();
}

// An ISA that is unknown or that this CPU lacks is refused by name, and the message names each that it has.
void check_refused(const std::string& isa, const std::vector<std::string>& available) {
  auto config = sized<pe_backend_config>();
  config.isa = isa.c_str();
  pe_backend* backend = nullptr;
  const pe_status status = pe_backend_create(&config, &backend);
  const std::string message = status == PE_OK ? "" : pe_last_error();
  bool good_message = message.find("'" + isa + "'") != std::string::npos;
  for (const std::string& name : available) good_message = good_message && message.find(name) != std::string::npos;
  std::printf("%s: refused: %s\n", isa.c_str(), message.c_str());
  if (status == PE_RESOURCE && good_message) return;
  std::fprintf(stderr, "%s: status %d; expected a refusal that names the available ISAs\n", isa.c_str(),
               static_cast<int>(status));
  ++failures;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> available, missing{"abacus"};
  for (int32_t i = 0; i < pe_isa_count(); ++i) (pe_isa_available(i) ? available : missing).push_back(pe_isa_name(i));
  std::vector<std::string> wanted(argv + 1, argv + argc);
  few = !wanted.empty() && wanted[0] == "--few";
  if (few) wanted.erase(wanted.begin());
  std::printf("CPU: %s\n", pe_cpu_features());
  if (!wanted.empty() && wanted != available) {
    std::fprintf(stderr, "this CPU was found to have:");
    for (const std::string& name : available) std::fprintf(stderr, " %s", name.c_str());
    std::fprintf(stderr, "; expected the names given\n");
    return 1;
  }
  for (const std::string& isa : missing) check_refused(isa, available);
  const std::vector<Output> expected = run_all("scalar", 1);
  for (const std::string& isa : available) compare(isa, run_all(isa.c_str(), 3), expected);
  return failures ? 1 : 0;
}
