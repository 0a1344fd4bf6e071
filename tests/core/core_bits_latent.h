// Part of core_bits: latent attention.
#pragma once

#include "core_bits_record.h"

namespace {

// Latent attention, its heads of sizes off the panels, 20 of them for one row of the cache; no FFN behind it.
pe_program* latent(Client& c, bool bf16, int32_t* kv_group) {
  constexpr int32_t kHeads = 20, kNope = 11, kRope = 6, kRank = 24, kValue = 9, kRow = kRank + kRope;
  Random random(77);
  const Format f{"", bf16 ? PE_BF16 : PE_F32, 0};
  const int32_t table = c.matrix(f, kVocab, kHidden, random),
                to_q = c.matrix(f, kHeads * (kNope + kRope), kHidden, random);
  const int32_t to_row = c.matrix(f, kRow, kHidden, random), o = c.matrix(f, kHidden, kHeads * kValue, random);
  const auto heads = [&](int64_t rows, int64_t cols) {
    const int32_t id = c.tensor(f.format, kHeads * up16(rows), cols);
    for (int64_t h = 0; h < kHeads; ++h) c.pack(id, random.normal(rows * cols), rows, h * up16(rows) / 16);
    return id;
  };
  const int32_t k_up = heads(kRank, kNope), v_up = heads(kValue, kRank);
  std::vector<float> angles(static_cast<size_t>(kBlocks * PE_KV_BLOCK * kRope));
  for (float& x : angles) x = static_cast<float>(random.bits() >> 40) * (2.0f / 16777216.0f) - 1.0f;
  int32_t rope = -1;
  good(pe_rope_set(c.backend, &rope, angles.data(), kBlocks * PE_KV_BLOCK, kRope, nullptr));
  auto kv = sized<pe_kv_desc>();
  kv.layers = kv.kv_heads = 1;
  kv.k_dim = kRow;
  kv.v_dim = kRank;
  kv.dtype = bf16 ? PE_KV_BF16 : PE_KV_F32;
  good(pe_kv_create(c.backend, &kv, kv_group));
  good(pe_kv_reserve(c.backend, *kv_group, 2 * kBlocks));
  enum : int32_t { kX, kQ, kLatent, kWide, kValues, kAttended };
  const std::vector<pe_buffer_desc> buffers{make_buffer(kHidden),        make_buffer(kHeads * (kNope + kRope)),
                                            make_buffer(kRow),           make_buffer(kHeads * kRow),
                                            make_buffer(kHeads * kRank), make_buffer(kHeads * kValue)};
  std::vector<pe_op> ops;
  const auto emit = [&](int32_t kind, int32_t input, int32_t output, int32_t weight, int32_t head_dim) -> pe_op& {
    pe_op op = make_op(kind, input, output);
    op.weight = weight;
    op.heads = kHeads;
    op.kv_heads = 1;
    op.head_dim = head_dim;
    op.scale = 0.25f;
    op.rope = rope;
    op.kv_group = *kv_group;
    op.kv_layer = 0;
    ops.push_back(op);
    return ops.back();
  };
  emit(PE_OP_EMBED, -1, kX, table, 0);
  emit(PE_OP_LINEAR, kX, kQ, to_q, 0);
  emit(PE_OP_LINEAR, kX, kLatent, to_row, 0);
  emit(PE_OP_LATENT_APPEND, kLatent, -1, -1, kRow).norm = c.vector(random.normal(kRank));
  emit(PE_OP_HEAD_LINEAR, kQ, kWide, k_up, kNope + kRope);
  emit(PE_OP_ATTENTION, kWide, kValues, -1, kRow);
  emit(PE_OP_HEAD_LINEAR, kValues, kAttended, v_up, kRank);
  emit(PE_OP_LINEAR_RESIDUAL, kAttended, kX, o, 0);
  emit(PE_OP_TAP, kX, -1, -1, 0);
  emit(PE_OP_LM_HEAD, kX, -1, table, 0).norm = c.vector(random.normal(kHidden));
  emit(PE_OP_SAMPLE, -1, -1, -1, 0);
  return c.program(ops, buffers, kMaxTokens);
}

}  // namespace
