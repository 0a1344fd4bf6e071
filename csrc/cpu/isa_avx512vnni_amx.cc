// The avx512vnni_amx object: the trait, the kernels, one constant table. CMakeLists.txt gives it the flags of its ISA.
#include "cpu/simd/avx512vnni_amx.h"

#include "cpu/kernels/table-inl.h"

PE_KERNEL_TABLE(kernels_avx512vnni_amx)
