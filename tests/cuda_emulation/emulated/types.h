// Types and keywords of CUDA C++, as the host compiler can read them.
#pragma once

#include <cstddef>
#include <cstdint>

#define __global__
#define __device__
#define __host__
#define __constant__ static
// One block runs at a time. As a variable of the thread it can be told from others and filled before every block
// (symbols.h); AddressSanitizer puts guards around static ones only.
#ifdef __SANITIZE_ADDRESS__
#define __shared__ static
#else
#define __shared__ static __thread
#endif
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))

#define PE_VECTOR_TYPE(type, scalar, alignment)                                        \
  struct __align__(alignment / 2) type##2 { scalar x, y; };                            \
  struct type##3 { scalar x, y, z; };                                                  \
  struct __align__(alignment) type##4 { scalar x, y, z, w; };                          \
  constexpr type##2 make_##type##2(scalar x, scalar y) { return {x, y}; }              \
  constexpr type##3 make_##type##3(scalar x, scalar y, scalar z) { return {x, y, z}; } \
  constexpr type##4 make_##type##4(scalar x, scalar y, scalar z, scalar w) { return {x, y, z, w}; }
PE_VECTOR_TYPE(char, signed char, 4)
PE_VECTOR_TYPE(uchar, unsigned char, 4)
PE_VECTOR_TYPE(short, short, 8)
PE_VECTOR_TYPE(ushort, unsigned short, 8)
PE_VECTOR_TYPE(int, int, 16)
PE_VECTOR_TYPE(uint, unsigned, 16)
PE_VECTOR_TYPE(float, float, 16)
#undef PE_VECTOR_TYPE
struct __align__(16) double2 {
  double x, y;
};
struct __align__(16) longlong2 {
  long long x, y;
};
struct __align__(16) ulonglong2 {
  unsigned long long x, y;
};
constexpr double2 make_double2(double x, double y) { return {x, y}; }
constexpr longlong2 make_longlong2(long long x, long long y) { return {x, y}; }
constexpr ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return {x, y, z}; }
};
