// The implementations compiled in, worst first, and which of them this CPU can run.
#pragma once

#include <string>
#include <vector>

#include "cpu/kernel_table.h"

namespace pe {

struct Implementation {
  const char* name;
  const KernelTable* table;
  bool available;
};

const std::vector<Implementation>& implementations();
const KernelTable& choose_kernels(const char* name);  // nullptr = the best available; throws Error(PE_RESOURCE)
const std::string& cpu_features();
int default_threads();

}  // namespace pe
