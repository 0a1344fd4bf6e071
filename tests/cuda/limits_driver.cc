// limits.cu, flat.
#include "cuda/limits.h"

#include "driver.h"

using namespace pe;
using namespace pe::cuda;

extern "C" {

const char* driver_error() { return last_error(); }

int limits_measure(int64_t limit, int64_t work, int64_t passes, double* per_second) {
  return driven([&](Stream stream) {
    pe_limit_args a{};
    a.struct_size = sizeof a;
    a.limit = static_cast<int32_t>(limit);
    a.work = work;
    a.passes = static_cast<int32_t>(passes);
    a.per_second = per_second;
    measure_limit(stream, a);
  });
}

}  // extern "C"
