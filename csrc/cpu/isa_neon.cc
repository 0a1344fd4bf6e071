// The neon object: the trait, the kernels, one constant table. CMakeLists.txt gives it the flags of its ISA.
#include "cpu/simd/neon.h"

#include "cpu/kernels/table-inl.h"

PE_KERNEL_TABLE(kernels_neon)
