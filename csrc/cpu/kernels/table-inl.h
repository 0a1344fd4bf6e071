// The one list of kernels that every ISA object exports.
#pragma once

#include "cpu/kernel_table.h"
#include "pyengine.h"

namespace {
using namespace pe;
}

// In order of use.
// clang-format off
#include "cpu/kernels/math-inl.h"
#include "cpu/kernels/rows-inl.h"
#include "cpu/kernels/quantize-inl.h"
#include "cpu/kernels/router-inl.h"
#include "cpu/kernels/linear-inl.h"
#include "cpu/kernels/dequantize-inl.h"
#ifdef PE_TILES
#include "cpu/kernels/tiles-inl.h"
#endif
#include "cpu/kernels/attention_int8-inl.h"
#include "cpu/kernels/attention-inl.h"
#include "cpu/kernels/pack-inl.h"
#include "cpu/kernels/probe-inl.h"
// clang-format on

#define PE_KERNEL_TABLE(symbol)                                                                               \
  namespace pe {                                                                                              \
  extern const KernelTable symbol;                                                                            \
  constexpr KernelTable kTable_##symbol = {                                                                   \
      simd::kName, rms_norm,   layer_norm, quantize, linear,     dequantize, ::add,       act_mul,   act,     \
      softcap,     gate,       route,      rope,     store_k,    store_v,    attention_q, attention, ::merge, \
      divide,      gather_row, argmax,     sum_exp,  pack_panel, probe_read, probe_int8,  probe_f32};         \
  const KernelTable symbol = kTable_##symbol;                                                                 \
  }
