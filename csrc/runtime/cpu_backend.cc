#include "runtime/cpu_backend.h"

#include "runtime/cpu_program.h"

namespace pe {

std::unique_ptr<Program> CpuBackend::create_program(const pe_program_desc& desc) {
  return std::make_unique<CpuProgram>(*this, desc);
}

std::unique_ptr<KvGroup> CpuBackend::create_kv(const pe_kv_desc& desc) { return std::make_unique<CpuKvGroup>(desc); }

void CpuBackend::flush() {
  for (const auto& t : tensors)
    if (t) flush_caches(t->bytes(), t->size());
  for (const auto& group : kv_groups)
    if (group) group->flush();
}

}  // namespace pe
