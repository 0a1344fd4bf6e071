// The functions of pyengine.h as a table: those linked in (the CPU library), or those of a library that is opened by
// its path. Everything behind uses a table, so both take one way.
#pragma once

#include <string>

#include "pyengine.h"

// Every function of the header, without its prefix. test_library.py compares the list with the header.
// clang-format off
#define PE_FUNCTIONS(F)                                                                                         \
  F(abi_version) F(last_error) F(compiler) F(commit) F(isa_count) F(isa_name) F(isa_available)                  \
  F(cpu_features) F(default_threads) F(device_count) F(device_name) F(device_bytes) F(backend_device)           \
  F(backend_create) F(backend_destroy) F(backend_isa) F(backend_threads) F(limit_measure) F(flush_caches)       \
  F(tensor_create) F(tensor_pack) F(tensor_data) F(tensor_dequantize) F(tensor_free) F(tensors_gather)          \
  F(tensors_write) F(tensors_map) F(checksum) F(rope_set) F(kv_create) F(kv_reserve) F(kv_block_bytes)          \
  F(program_create) F(program_run) F(program_times) F(program_routing) F(program_info) F(program_destroy)
// clang-format on

namespace pe_py {

struct Api {
#define PE_POINTER(name) decltype(&::pe_##name) name = nullptr;
  PE_FUNCTIONS(PE_POINTER)
#undef PE_POINTER
};

const Api& linked();  // the CPU library

// Another library with this ABI. It stays open until the process ends: it may have threads and device memory.
struct Library {
  explicit Library(const std::string& path);  // raises ResourceError
  std::string path;
  Api api;
};

}  // namespace pe_py
