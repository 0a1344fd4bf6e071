// Device memory, shared memory and what lies around them: pages that cannot be touched, and a pattern (NaN as float32)
// where nothing was written yet.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cuda_emulation {

constexpr int kGarbage = 0xff;
constexpr size_t kMaxSharedBytes = 99 << 10, kDefaultSharedBytes = 48 << 10;  // of a block, as on sm_86 and sm_89

// nullptr: none left.
void* device_allocate(size_t bytes);
bool device_free(void*);  // false: not an allocation
bool in_device_memory(const void*, size_t bytes);
size_t device_bytes_used();
size_t device_bytes_total();  // PYENGINE_CUDA_EMULATION_BYTES, by default 4 GiB

// The first word in `bytes` that is the address of mapped memory other than the device's, or nullptr.
const void* host_pointer_in(const void* bytes, size_t size);

void begin_shared_memory(const void* kernel);             // before a launch
void fill_shared_memory(int slot, size_t dynamic_bytes);  // before a block; two can be under way, in slots 0 and 1
void suspend_shared_memory(int slot);
void resume_shared_memory(int slot);
bool in_shared_memory(const void*, size_t bytes);
const char* check_shared_memory();  // what a block wrote outside, or nullptr

// SIGSEGV inside a kernel becomes the launch's error; elsewhere the handler in front gets it.
void install_fault_handler();

}  // namespace cuda_emulation
