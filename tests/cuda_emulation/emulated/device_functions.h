// What CUDA C++ declares for device code. Bits are the device's, but for: rsqrtf, expf, logf, tanhf, sinf, powf and the
// fast forms (__expf, __fdividef, ...), which are the host's and so nearer to the true value; and a multiplication and
// an addition, which stay apart unless fmaf is called (nvcc contracts them by default).
#pragma once

#include <math.h>

#include <bit>
#include <cstring>
#include <type_traits>

#include "scheduler.h"

namespace cuda_emulation {

template <class T, class Choose>
T shuffle(const char* name, unsigned mask, T value, int parameter, int width, Site site, Choose) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "what __shfl_sync takes");
  if (width < 1 || width > kLanes || (width & (width - 1))) thread_error(site, "%s: width %d", name, width);
  T result{};
  WarpOp op{name, mask, site, &value, &result, parameter, width, [](WarpOp* const* ops) {
              for (int lane = 0; lane < kLanes; ++lane) {
                if (!ops[lane]) continue;
                const int from = Choose{}(lane, ops[lane]->parameter, ops[lane]->width);
                if (!ops[from]) return Fault{lane, "reads a lane that is not in the mask"};
                memcpy(ops[lane]->out, ops[from]->in, sizeof(T));
              }
              return Fault{};
            }};
  warp_op(op);
  return result;
}

struct FromLane {
  int operator()(int lane, int from, int width) const { return (lane & ~(width - 1)) | (from & (width - 1)); }
};
struct FromXor {
  int operator()(int lane, int bits, int width) const {
    const int from = lane ^ bits;
    return from >= (lane & ~(width - 1)) + width || from < 0 ? lane : from;
  }
};
struct FromBelow {
  int operator()(int lane, int delta, int width) const {
    return lane - delta < (lane & ~(width - 1)) ? lane : lane - delta;
  }
};
struct FromAbove {
  int operator()(int lane, int delta, int width) const {
    return (lane & (width - 1)) + delta >= width ? lane : lane + delta;
  }
};

template <class T, class Combine>
T reduce(const char* name, unsigned mask, T value, Site site, Combine) {
  T result{};
  WarpOp op{name, mask, site, &value, &result, 0, kLanes, [](WarpOp* const* ops) {
              T all{};
              bool first = true;
              for (int lane = 0; lane < kLanes; ++lane) {
                if (!ops[lane]) continue;
                const T x = *static_cast<const T*>(ops[lane]->in);
                all = first ? x : Combine{}(all, x);
                first = false;
              }
              for (int lane = 0; lane < kLanes; ++lane)
                if (ops[lane]) *static_cast<T*>(ops[lane]->out) = all;
              return Fault{};
            }};
  warp_op(op);
  return result;
}

inline unsigned ballot(const char* name, unsigned mask, int predicate, Site site) {
  const unsigned mine = predicate ? 1u << current_lane() : 0;
  return reduce(name, mask, mine, site, [](unsigned a, unsigned b) { return a | b; });
}

template <class T, class Change>
T atomic(T* address, Site site, Change change) {
  relax(site);
  const T old = *address;
  *address = change(old);
  return old;
}

}  // namespace cuda_emulation

#define PE_SITE cuda_emulation::Site site = cuda_emulation::Site::here()

// ---- barriers -------------------------------------------------------------------------------------------------------

inline void __syncthreads(PE_SITE) { cuda_emulation::block_barrier(cuda_emulation::Vote::none, 0, site); }
inline int __syncthreads_or(int predicate, PE_SITE) {
  return cuda_emulation::block_barrier(cuda_emulation::Vote::any, predicate, site);
}
inline int __syncthreads_and(int predicate, PE_SITE) {
  return cuda_emulation::block_barrier(cuda_emulation::Vote::all, predicate, site);
}
inline int __syncthreads_count(int predicate, PE_SITE) {
  return cuda_emulation::block_barrier(cuda_emulation::Vote::count, predicate, site);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, PE_SITE) {
  cuda_emulation::WarpOp op{
      "__syncwarp", mask, site, nullptr,
      nullptr,      0,    0,    [](cuda_emulation::WarpOp* const*) { return cuda_emulation::Fault{}; }};
  cuda_emulation::warp_op(op);
}
inline void __threadfence(PE_SITE) { cuda_emulation::relax(site); }
inline void __threadfence_block(PE_SITE) { cuda_emulation::relax(site); }
inline void __threadfence_system(PE_SITE) { cuda_emulation::relax(site); }
inline void __nanosleep(unsigned, PE_SITE) { cuda_emulation::relax(site); }
[[noreturn]] inline void __trap(PE_SITE) { cuda_emulation::thread_error(site, "__trap"); }

// ---- exchanges of a warp --------------------------------------------------------------------------------------------

template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = warpSize, PE_SITE) {
  return cuda_emulation::shuffle("__shfl_sync", mask, value, from, width, site, cuda_emulation::FromLane{});
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = warpSize, PE_SITE) {
  return cuda_emulation::shuffle("__shfl_xor_sync", mask, value, bits, width, site, cuda_emulation::FromXor{});
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize, PE_SITE) {
  return cuda_emulation::shuffle("__shfl_up_sync", mask, value, static_cast<int>(delta), width, site,
                                 cuda_emulation::FromBelow{});
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize, PE_SITE) {
  return cuda_emulation::shuffle("__shfl_down_sync", mask, value, static_cast<int>(delta), width, site,
                                 cuda_emulation::FromAbove{});
}
inline unsigned __ballot_sync(unsigned mask, int predicate, PE_SITE) {
  return cuda_emulation::ballot("__ballot_sync", mask, predicate, site);
}
inline int __any_sync(unsigned mask, int predicate, PE_SITE) {
  return cuda_emulation::ballot("__any_sync", mask, predicate, site) != 0;
}
inline int __all_sync(unsigned mask, int predicate, PE_SITE) {
  return cuda_emulation::ballot("__all_sync", mask, predicate, site) == mask;
}
template <class T>
T __reduce_add_sync(unsigned mask, T value, PE_SITE) {
  return cuda_emulation::reduce("__reduce_add_sync", mask, value, site, [](T a, T b) {
    return static_cast<T>(static_cast<unsigned>(a) + static_cast<unsigned>(b));
  });
}
template <class T>
T __reduce_max_sync(unsigned mask, T value, PE_SITE) {
  return cuda_emulation::reduce("__reduce_max_sync", mask, value, site, [](T a, T b) { return a < b ? b : a; });
}
template <class T>
T __reduce_min_sync(unsigned mask, T value, PE_SITE) {
  return cuda_emulation::reduce("__reduce_min_sync", mask, value, site, [](T a, T b) { return b < a ? b : a; });
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value, PE_SITE) {
  return cuda_emulation::reduce("__reduce_or_sync", mask, value, site, [](unsigned a, unsigned b) { return a | b; });
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned value, PE_SITE) {
  return cuda_emulation::reduce("__reduce_and_sync", mask, value, site, [](unsigned a, unsigned b) { return a & b; });
}
inline unsigned __reduce_xor_sync(unsigned mask, unsigned value, PE_SITE) {
  return cuda_emulation::reduce("__reduce_xor_sync", mask, value, site, [](unsigned a, unsigned b) { return a ^ b; });
}

// ---- atomics: one thread runs at a time -----------------------------------------------------------------------------

template <class T>
T atomicAdd(T* address, std::type_identity_t<T> value, PE_SITE) {
  return cuda_emulation::atomic(address, site, [&](T old) { return static_cast<T>(old + value); });
}
template <class T>
T atomicSub(T* address, std::type_identity_t<T> value, PE_SITE) {
  return cuda_emulation::atomic(address, site, [&](T old) { return static_cast<T>(old - value); });
}
template <class T>
T atomicMax(T* address, std::type_identity_t<T> value, PE_SITE) {
  static_assert(std::is_integral_v<T>);
  return cuda_emulation::atomic(address, site, [&](T old) { return old < value ? value : old; });
}
template <class T>
T atomicMin(T* address, std::type_identity_t<T> value, PE_SITE) {
  static_assert(std::is_integral_v<T>);
  return cuda_emulation::atomic(address, site, [&](T old) { return value < old ? value : old; });
}
template <class T>
T atomicOr(T* address, std::type_identity_t<T> value, PE_SITE) {
  return cuda_emulation::atomic(address, site, [&](T old) { return old | value; });
}
template <class T>
T atomicAnd(T* address, std::type_identity_t<T> value, PE_SITE) {
  return cuda_emulation::atomic(address, site, [&](T old) { return old & value; });
}
template <class T>
T atomicExch(T* address, std::type_identity_t<T> value, PE_SITE) {
  return cuda_emulation::atomic(address, site, [&](T) { return value; });
}
template <class T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value, PE_SITE) {
  static_assert(std::is_integral_v<T>);
  return cuda_emulation::atomic(address, site, [&](T old) { return old == expected ? value : old; });
}
inline unsigned atomicInc(unsigned* address, unsigned limit, PE_SITE) {
  return cuda_emulation::atomic(address, site, [&](unsigned old) { return old >= limit ? 0u : old + 1; });
}

// ---- loads and stores -----------------------------------------------------------------------------------------------

template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T __ldcg(const T* address) {
  return *address;
}
template <class T>
T __ldcs(const T* address) {
  return *address;
}
template <class T>
void __stcg(T* address, std::type_identity_t<T> value) {
  *address = value;
}
template <class T>
void __stcs(T* address, std::type_identity_t<T> value) {
  *address = value;
}

// ---- bits -----------------------------------------------------------------------------------------------------------

inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (x >> i & 1u) << (31 - i);
  return r;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned s = selector >> (4 * i) & 0xf, b = static_cast<unsigned>(bytes >> (8 * (s & 7)) & 0xff);
    r |= (s & 8 ? (b & 0x80 ? 0xffu : 0u) : b) << (8 * i);
  }
  return r;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}
inline unsigned __umulhi(unsigned x, unsigned y) { return static_cast<unsigned>(static_cast<uint64_t>(x) * y >> 32); }
inline int __mulhi(int x, int y) { return static_cast<int>(static_cast<int64_t>(x) * y >> 32); }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(x) * y >> 64);
}
inline int __dp4a(int a, int b, int sum) {
  unsigned s = static_cast<unsigned>(sum);
  for (int i = 0; i < 32; i += 8) s += static_cast<unsigned>(static_cast<int8_t>(a >> i) * static_cast<int8_t>(b >> i));
  return static_cast<int>(s);
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
  for (int i = 0; i < 32; i += 8)
    sum += static_cast<unsigned>(static_cast<uint8_t>(a >> i) * static_cast<uint8_t>(b >> i));
  return sum;
}

// ---- arithmetic -----------------------------------------------------------------------------------------------------

inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __frsqrt_rn(float x) { return static_cast<float>(1.0 / sqrt(static_cast<double>(x))); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanhf(float x) { return tanhf(x); }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline float __ll2float_rn(long long x) { return static_cast<float>(x); }
// Out of range: the nearest int; NaN: 0.
inline int __float2int_rn(float x) {
  if (!(x == x)) return 0;
  return x >= 0x1p31f ? INT32_MAX : x < -0x1p31f ? INT32_MIN : static_cast<int>(rintf(x));
}
inline int __float2int_rz(float x) { return __float2int_rn(truncf(x)); }
inline int __float2int_rd(float x) { return __float2int_rn(floorf(x)); }
inline int __float2int_ru(float x) { return __float2int_rn(ceilf(x)); }
inline unsigned __float2uint_rn(float x) {
  if (!(x > 0)) return 0;
  return x >= 0x1p32f ? UINT32_MAX : static_cast<unsigned>(rintf(x));
}

template <class T>
  requires std::is_arithmetic_v<T>
constexpr T min(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) return fmin(a, b);
  return b < a ? b : a;
}
template <class T>
  requires std::is_arithmetic_v<T>
constexpr T max(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) return fmax(a, b);
  return a < b ? b : a;
}
