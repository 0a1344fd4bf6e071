// Part of core_bits: mixtures of experts.
#pragma once

#include "core_bits_record.h"

namespace {

// A mixture of experts with a selection bias, groups and a gate, fused and unfused, of one token up to many.
void experts(Client& c, Recorder& out) {
  constexpr int64_t kWidth = 88, kWide = 52;
  constexpr int32_t kExperts = 12, kTopK = 3, kTokens = 40;
  for (const Format& f : kFormats) {
    Random random(17);
    const std::vector<float> x = random.normal(kTokens * kWidth);
    const int32_t router = c.matrix(kFormats[0], kExperts, kWidth, random), bias = c.vector(random.normal(kExperts));
    const int32_t gate = c.vector(random.normal(kWidth)), none = c.vector(std::vector<float>(kWidth, 0.0f));
    const int64_t rows = up16(kWide), down_rows = up16(kWidth);
    const int32_t gate_up = c.tensor(f.format, kExperts * 2 * rows, kWidth, f.group);
    const int32_t down = c.tensor(f.format, kExperts * down_rows, kWide, f.group);
    for (int64_t e = 0; e < kExperts; ++e) {
      for (int64_t side = 0; side < 2; ++side)
        c.pack(gate_up, random.normal(kWide * kWidth), kWide, e * 2 * rows / 16 + side, 2);
      c.pack(down, random.normal(kWidth * kWide), kWidth, e * down_rows / 16);
    }
    enum : int32_t { kX, kXQ, kScores, kRouting, kAct, kActQ, kRows, kBranch, kOut };
    std::vector<pe_buffer_desc> buffers{make_buffer(kWidth),    make_buffer(kWidth, true), make_buffer(kExperts),
                                        make_buffer(2 * kTopK), make_buffer(kWide),        make_buffer(kWide, true),
                                        make_buffer(kWidth),    make_buffer(kWidth),       make_buffer(kWidth)};
    for (const int32_t b : {kAct, kActQ, kRows}) buffers[static_cast<size_t>(b)].rows = kTopK;
    const bool q = f.integer();
    std::vector<float> unfused[2];
    for (const bool fused : {false, true})
      for (const int32_t scoring : {PE_SOFTMAX, PE_SIGMOID}) {
        std::vector<pe_op> ops;
        const auto emit = [&](int32_t kind, int32_t input, int32_t output) -> pe_op& {
          pe_op op = make_op(kind, input, output);
          op.experts = kExperts;
          op.top_k = kTopK;
          op.activation = scoring == PE_SOFTMAX ? PE_SILU : PE_GELU_TANH;
          ops.push_back(op);
          return ops.back();
        };
        emit(PE_OP_LOAD_HIDDEN, -1, kX);
        emit(PE_OP_MASK_COLUMNS, -1, kOut).norm = none;
        pe_op& r = emit(PE_OP_ROUTER, kX, kRouting);
        r.weight = router;
        r.bias = bias;
        r.scratch = kScores;
        r.groups = 4;
        r.top_groups = 2;
        r.scoring = scoring;
        r.group_score = PE_GROUP_TOP2_SUM;
        r.normalise = 1;
        r.scale = 2.5f;
        if (q) emit(PE_OP_QUANTIZE, kX, kXQ);
        const auto of_experts = [&](pe_op& op) {
          op.routing = kRouting;
          op.rows = kRows;
          op.weight = gate_up;
          op.weight2 = down;
        };
        if (fused) {
          pe_op& op = emit(PE_OP_MOE_FFN_RESIDUAL, q ? kXQ : kX, kOut);
          of_experts(op);
          op.scratch = q ? kActQ : kAct;
        } else {
          of_experts(emit(PE_OP_MOE_GATE_UP, q ? kXQ : kX, kAct));
          if (q) emit(PE_OP_QUANTIZE, kAct, kActQ);
          of_experts(emit(PE_OP_MOE_DOWN, q ? kActQ : kAct, kBranch));
          emit(PE_OP_ADD, kBranch, kOut);
        }
        emit(PE_OP_GATE, kX, kOut).norm = gate;
        emit(PE_OP_TAP, kOut, -1);
        pe_program* program = c.program(ops, buffers, kTokens);
        const std::string what = std::string(f.name) + " experts, scoring " + std::to_string(scoring);
        const std::vector<float> all = run_hidden(program, x, kTokens, kWidth);
        out.add(what, all);
        if (!fused) unfused[scoring] = all;
        if (all != unfused[scoring]) {
          std::fprintf(stderr, "%s: %s: fused and unfused differ\n", pe_backend_isa(c.backend), what.c_str());
          ++failures;
        }
        for (const int32_t m : {1, 2, 3, 9, 20}) {
          const std::vector<float> few = run_hidden(program, x, m, kWidth);
          if (std::memcmp(few.data(), all.data(), few.size() * 4) == 0) continue;
          std::fprintf(stderr, "%s: %s: the first %d of %d tokens differ\n", pe_backend_isa(c.backend), what.c_str(), m,
                       kTokens);
          ++failures;
        }
      }
  }
}

}  // namespace
