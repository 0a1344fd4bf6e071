// Errors inside the core: one exception type, turned into a pe_status and a message at the C border.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "pyengine.h"

namespace pe {

class Error : public std::runtime_error {
 public:
  Error(pe_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  pe_status status() const { return status_; }

 private:
  pe_status status_;
};

[[noreturn]] void fail(pe_status status, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Sets this thread's last error; returns the status.
pe_status report(pe_status status, const char* message) noexcept;
const char* last_error() noexcept;

// Runs `body`, mapping exceptions to a status.
template <class F>
pe_status guarded(F&& body) noexcept {
  try {
    body();
    return PE_OK;
  } catch (const Error& e) {
    return report(e.status(), e.what());
  } catch (const std::bad_alloc&) {
    return report(PE_RESOURCE, "out of memory");
  } catch (const std::exception& e) {
    return report(PE_INTERNAL, e.what());
  }
}

}  // namespace pe
