// What libpyengine_cpu.so is built with: the CPU alone.
#include <cstring>

#include "core/status.h"
#include "runtime/cpu_backend.h"

namespace pe {

std::unique_ptr<pe_backend> create_backend(const pe_backend_config& config) {
  if (config.device && std::strcmp(config.device, "cpu") != 0)
    fail(PE_UNSUPPORTED, "device %s: this library was built without CUDA; expected cpu", config.device);
  return std::make_unique<CpuBackend>(config.threads, config.isa);
}

int32_t device_count(std::string& why_none) {
  why_none = "built without CUDA";
  return 0;
}

const char* device_name(int32_t) { return nullptr; }

void device_bytes(int32_t device, uint64_t*, uint64_t*) {
  fail(PE_REQUEST, "device %d does not exist: built without CUDA", device);
}

}  // namespace pe
