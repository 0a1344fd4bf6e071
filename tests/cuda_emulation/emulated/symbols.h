// Names of kernels, and where their static __shared__ variables lie, from the symbol table of the file that holds them.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace cuda_emulation {

std::string symbol_name(const void* function);  // or file+offset, where the file has no symbol table
// [begin, bytes) of all those of the file, for the thread that calls.
std::vector<std::pair<char*, size_t>> shared_variables(const void* kernel);

}  // namespace cuda_emulation
