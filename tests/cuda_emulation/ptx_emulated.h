// The twins of the functions in csrc/cuda/ptx.h, written from the PTX ISA's tables of fragments.
#pragma once

#include "emulated/device_functions.h"

namespace pe::cuda {

inline uint8_t* shared_memory() { return cuda_emulation::dynamic_shared_memory(); }

namespace emulated {

template <class Sum>
struct Fragments {
  Sum* d;
  const uint32_t *a, *b;
};

// m16n8k32 of bytes. Of A, lane 4g + t holds rows g and g + 8, columns 4t..4t+3 and 16 more; of B rows 4t..4t+3 (and 16
// more) of column g; of D rows g and g + 8, columns 2t and 2t + 1.
template <class A>
cuda_emulation::Fault mma_bytes(cuda_emulation::WarpOp* const* ops) {
  int32_t a[16][32], b[8][32];  // b: column by column
  for (int lane = 0; lane < 32; ++lane) {
    const auto* f = static_cast<const Fragments<int32_t>*>(ops[lane]->in);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i)
      for (int k = 0; k < 4; ++k) a[g + 8 * (i & 1)][4 * t + k + 16 * (i / 2)] = static_cast<A>(f->a[i] >> (8 * k));
    for (int i = 0; i < 2; ++i)
      for (int k = 0; k < 4; ++k) b[g][4 * t + k + 16 * i] = static_cast<int8_t>(f->b[i] >> (8 * k));
  }
  for (int lane = 0; lane < 32; ++lane) {
    const auto* f = static_cast<const Fragments<int32_t>*>(ops[lane]->in);
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + (i & 1);
      int32_t sum = 0;
      for (int k = 0; k < 32; ++k) sum += a[row][k] * b[column][k];
      f->d[i] = static_cast<int32_t>(static_cast<uint32_t>(f->d[i]) + static_cast<uint32_t>(sum));
    }
  }
  return {};
}

// m16n8k16 of bfloat16, two in a register, the lower column first. The tensor cores do not say in which order they add,
// nor how they round: here it is a double, rounded once.
inline cuda_emulation::Fault mma_bf16s(cuda_emulation::WarpOp* const* ops) {
  float a[16][16], b[8][16];
  const auto value = [](uint32_t pair, int half) { return __uint_as_float(half ? pair & 0xffff0000u : pair << 16); };
  for (int lane = 0; lane < 32; ++lane) {
    const auto* f = static_cast<const Fragments<float>*>(ops[lane]->in);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i)
      for (int k = 0; k < 2; ++k) a[g + 8 * (i & 1)][2 * t + k + 8 * (i / 2)] = value(f->a[i], k);
    for (int i = 0; i < 2; ++i)
      for (int k = 0; k < 2; ++k) b[g][2 * t + k + 8 * i] = value(f->b[i], k);
  }
  for (int lane = 0; lane < 32; ++lane) {
    const auto* f = static_cast<const Fragments<float>*>(ops[lane]->in);
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + (i & 1);
      double sum = f->d[i];
      for (int k = 0; k < 16; ++k) sum += static_cast<double>(a[row][k]) * b[column][k];
      f->d[i] = static_cast<float>(sum);
    }
  }
  return {};
}

template <class Sum>
void mma(const char* name, Sum* d, const uint32_t* a, const uint32_t* b,
         cuda_emulation::Fault (*finish)(cuda_emulation::WarpOp* const*), cuda_emulation::Site site) {
  const Fragments<Sum> fragments{d, a, b};
  cuda_emulation::WarpOp op{name, 0xffffffffu, site, &fragments, nullptr, 0, 0, finish, true};
  cuda_emulation::warp_op(op);
}

}  // namespace emulated

inline void mma_u8s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], PE_SITE) {
  emulated::mma("mma_u8s8", d, a, b, emulated::mma_bytes<uint8_t>, site);
}
inline void mma_s8s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], PE_SITE) {
  emulated::mma("mma_s8s8", d, a, b, emulated::mma_bytes<int8_t>, site);
}
inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], PE_SITE) {
  emulated::mma("mma_bf16", d, a, b, emulated::mma_bf16s, site);
}

namespace emulated {
inline uint32_t pair_at(uint64_t low, uint64_t high, int at) {
  uint16_t pair[2];
  memcpy(pair, reinterpret_cast<const uint8_t*>(low) + at, 2);
  memcpy(pair + 1, reinterpret_cast<const uint8_t*>(high) + at, 2);
  return pair[0] | static_cast<uint32_t>(pair[1]) << 16;
}
inline uint64_t matrix_row(const void* row, int lane, cuda_emulation::Site site) {
  const auto address = reinterpret_cast<uint64_t>(row);
  if (address % 16) cuda_emulation::thread_error(site, "load_matrices: %p is not aligned to 16 bytes", row);
  return __shfl_sync(0xffffffffu, address, lane, 32, site);
}
}  // namespace emulated

inline void load_matrices(uint32_t (&d)[4], const void* row, PE_SITE) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  for (int m = 0; m < 4; ++m) {
    const uint64_t from = emulated::matrix_row(row, 8 * m + g, site);
    d[m] = emulated::pair_at(from, from + 2, 4 * t);
  }
}
inline void load_matrices_transposed(uint32_t (&d)[4], const void* row, PE_SITE) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  for (int m = 0; m < 4; ++m) {
    const uint64_t low = emulated::matrix_row(row, 8 * m + 2 * t, site);
    d[m] = emulated::pair_at(low, emulated::matrix_row(row, 8 * m + 2 * t + 1, site), 2 * g);
  }
}

// The bytes arrive when the thread waits for their group, never before: until then `shared` holds garbage.
inline void copy_async16(void* shared, const void* global, PE_SITE) {
  cuda_emulation::copy_async(shared, global, 16, site);
}
inline void copy_async4(void* shared, const void* global, PE_SITE) {
  cuda_emulation::copy_async(shared, global, 4, site);
}
inline void copy_async_commit() { cuda_emulation::copy_async_commit(); }
template <int N>
void copy_async_wait() {
  cuda_emulation::copy_async_wait(N);
}

inline uint4 load_once(const void* global, PE_SITE) {
  if (reinterpret_cast<uintptr_t>(global) % 16)
    cuda_emulation::thread_error(site, "load_once: %p is not aligned to 16 bytes", global);
  return *static_cast<const uint4*>(global);
}
inline void prefetch_l2(const void*) {}  // of an address outside of memory it does nothing on the device, too

inline void wait_for_previous(PE_SITE) { cuda_emulation::previous_grid_wait(site); }
inline void let_next_start() { cuda_emulation::next_grid_may_start(); }

}  // namespace pe::cuda
