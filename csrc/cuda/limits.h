// What the device can do: bytes read from its memory, operations of int8 and float32 in registers (pe_limit_measure).
#pragma once

#include "cuda/kernels.h"
#include "pyengine.h"

namespace pe::cuda {

// Passes one by one on the stream, each timed with events. PE_LIMIT_READ: a read-only reduction over a buffer made for
// it, or over one of several in turn where they would stay in the second level cache.
void measure_limit(Stream, const pe_limit_args&);

}  // namespace pe::cuda
