#include "core/status.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace pe {

namespace {
thread_local char message_[1024] = "";
}

void fail(pe_status status, const char* format, ...) {
  char text[1024];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  va_end(args);
  throw Error(status, text);
}

pe_status report(pe_status status, const char* message) noexcept {
  std::snprintf(message_, sizeof message_, "%s", message);
  return status;
}

const char* last_error() noexcept { return message_; }

}  // namespace pe
