// The implementations compiled in, worst first, and which of them this CPU can run.
#pragma once

#include <span>

#include "cpu/kernel_table.h"

namespace pe {

struct Implementation {
  const char* name;
  const KernelTable* table;
  bool available;
};

std::span<const Implementation> implementations();
const KernelTable& choose_kernels(const char* name);  // nullptr = the best available; throws Error(PE_RESOURCE)
const char* cpu_features();                           // names, a blank between two
int default_threads();                                // threads.cc

}  // namespace pe
