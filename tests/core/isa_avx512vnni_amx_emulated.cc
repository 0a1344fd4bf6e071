// The avx512vnni_amx object with its tiles emulated, for CPUs without AMX: the kernels, the shapes they configure and
// the strides they pass are those of the real object. Built only under PYENGINE_TEST_ISAS.
#define PE_TILE_EMULATION "../../../tests/core/amx_emulation.h"
#include "cpu/simd/avx512vnni_amx.h"

#include "cpu/kernels/table-inl.h"

PE_KERNEL_TABLE(kernels_avx512vnni_amx_emulated)
