// The backend that computes on the CPU.
#pragma once

#include "runtime/backend.h"

namespace pe {

class CpuBackend final : public pe_backend {
 public:
  using pe_backend::pe_backend;
  const char* device() const override { return "cpu"; }
  std::unique_ptr<Program> create_program(const pe_program_desc& desc) override;
  std::unique_ptr<KvGroup> create_kv(const pe_kv_desc& desc) override;
  void measure(const pe_limit_args& args) override;  // limits.cc
  void flush() override;
};

}  // namespace pe
