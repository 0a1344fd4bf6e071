// The avx512vnni object: the trait, the kernels, one constant table. CMakeLists.txt gives it the flags of its ISA.
#include "cpu/simd/avx512vnni.h"

#include "cpu/kernels/table-inl.h"

PE_KERNEL_TABLE(kernels_avx512vnni)
