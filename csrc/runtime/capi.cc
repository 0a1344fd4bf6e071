// The C border: every function checks its pointers and struct sizes, and turns exceptions into a status.
#include <cstring>
#include <new>

#include "core/checksum.h"
#include "core/status.h"
#include "runtime/backend.h"
#include "runtime/program.h"

using namespace pe;

namespace {

template <class T>
const T& checked(const T* s, const char* what) {
  if (!s) fail(PE_REQUEST, "%s is NULL", what);
  if (s->struct_size != sizeof(T))
    fail(PE_REQUEST, "%s has struct_size %u; expected %zu", what, s->struct_size, sizeof(T));
  return *s;
}

void check_pointer(const void* p, const char* what) {
  if (!p) fail(PE_REQUEST, "%s is NULL", what);
}

const pe_tensor_file& checked_file(const pe_tensor_file* file) {
  const auto& f = checked(file, "file");
  check_pointer(f.ids, "ids");
  if (f.count < 1 || f.offset % 64 || f.offset >= uint64_t{1} << 62)
    fail(PE_REQUEST, "%d tensors at byte %llu; expected at least one, at a multiple of 64", f.count,
         static_cast<unsigned long long>(f.offset));
  return f;
}

// The lowest free place of a list of owners.
template <class List, class Item>
int32_t put(List& list, Item&& item) {
  for (size_t i = 0; i < list.size(); ++i)
    if (!list[i]) {
      list[i] = std::forward<Item>(item);
      return static_cast<int32_t>(i);
    }
  list.push_back(std::forward<Item>(item));
  return static_cast<int32_t>(list.size() - 1);
}

}  // namespace

extern "C" {

int32_t pe_abi_version(void) { return PE_ABI_VERSION; }
const char* pe_last_error(void) { return last_error(); }
const char* pe_compiler(void) {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "gcc " __VERSION__;
#endif
}
const char* pe_commit(void) { return PE_COMMIT; }
int32_t pe_isa_count(void) { return static_cast<int32_t>(implementations().size()); }
const char* pe_isa_name(int32_t i) {
  return i >= 0 && i < pe_isa_count() ? implementations()[static_cast<size_t>(i)].name : nullptr;
}
int32_t pe_isa_available(int32_t i) {
  return i >= 0 && i < pe_isa_count() && implementations()[static_cast<size_t>(i)].available;
}
const char* pe_cpu_features(void) { return cpu_features(); }
int32_t pe_default_threads(void) { return default_threads(); }
int32_t pe_device_count(void) {
  int32_t count = 0;
  guarded([&] {
    std::string why_none;
    count = device_count(why_none);
    if (count == 0) report(PE_RESOURCE, why_none.c_str());
  });
  return count;
}
const char* pe_device_name(int32_t i) {
  const char* name = nullptr;
  guarded([&] { name = device_name(i); });
  return name;
}
pe_status pe_device_bytes(int32_t i, uint64_t* free, uint64_t* total) {
  return guarded([&] {
    check_pointer(free, "free");
    check_pointer(total, "total");
    device_bytes(i, free, total);
  });
}

pe_status pe_backend_create(const pe_backend_config* config, pe_backend** out) {
  return guarded([&] {
    check_pointer(out, "out");
    const auto& c = checked(config, "config");
    *out = create_backend(c).release();
  });
}
void pe_backend_destroy(pe_backend* backend) { delete backend; }
const char* pe_backend_isa(const pe_backend* backend) { return backend ? backend->kernels.name : nullptr; }
const char* pe_backend_device(const pe_backend* backend) { return backend ? backend->device() : nullptr; }
int32_t pe_backend_threads(const pe_backend* backend) { return backend ? backend->team.size() : 0; }

pe_status pe_limit_measure(pe_backend* backend, const pe_limit_args* args) {
  return guarded([&] {
    check_pointer(backend, "backend");
    const auto& a = checked(args, "args");
    check_pointer(a.per_second, "per_second");
    backend->measure(a);
  });
}
pe_status pe_flush_caches(pe_backend* backend) {
  return guarded([&] {
    check_pointer(backend, "backend");
    backend->flush();
  });
}

pe_status pe_tensor_create(pe_backend* backend, const pe_tensor_desc* desc, int32_t* id) {
  return guarded([&] {
    check_pointer(backend, "backend");
    check_pointer(id, "id");
    *id = put(backend->tensors, std::make_shared<Tensor>(checked(desc, "desc")));
  });
}
pe_status pe_tensor_pack(pe_backend* backend, int32_t id, const pe_pack_args* args) {
  return guarded([&] {
    check_pointer(backend, "backend");
    backend->pack(id, checked(args, "args"));
  });
}
pe_status pe_tensor_data(pe_backend* backend, int32_t id, void** data, size_t* bytes) {
  return guarded([&] {
    check_pointer(backend, "backend");
    const Tensor& t = backend->tensor(id);
    if (data) {
      backend->tensor_changes(t);  // the caller may write there
      *data = t.bytes();
    }
    if (bytes) *bytes = t.size();
  });
}
pe_status pe_tensor_dequantize(pe_backend* backend, int32_t id, float* out) {
  return guarded([&] {
    check_pointer(backend, "backend");
    check_pointer(out, "out");
    backend->dequantize(id, out);
  });
}
pe_status pe_tensor_free(pe_backend* backend, int32_t id) {
  return guarded([&] {
    check_pointer(backend, "backend");
    backend->tensor(id);
    backend->tensors[static_cast<size_t>(id)].reset();
  });
}

pe_status pe_tensors_gather(pe_backend* backend, const int32_t* ids, int32_t count) {
  return guarded([&] {
    check_pointer(backend, "backend");
    if (count < 0) fail(PE_REQUEST, "%d tensors", count);
    if (count > 0) check_pointer(ids, "ids");
    backend->gather_tensors(ids, count);
  });
}
pe_status pe_tensors_write(pe_backend* backend, const pe_tensor_file* file, uint64_t* bytes) {
  return guarded([&] {
    check_pointer(backend, "backend");
    check_pointer(bytes, "bytes");
    *bytes = backend->write_tensors(checked_file(file));
  });
}
pe_status pe_tensors_map(pe_backend* backend, const pe_tensor_file* file) {
  return guarded([&] {
    check_pointer(backend, "backend");
    const auto& f = checked_file(file);
    check_pointer(f.descs, "descs");
    for (int32_t i = 0; i < f.count; ++i) checked(&f.descs[i], "desc");
    const auto made = backend->map_tensors(f);
    backend->tensors.reserve(backend->tensors.size() + made.size());  // from here on nothing throws
    for (int32_t i = 0; i < f.count; ++i) f.ids[i] = put(backend->tensors, made[static_cast<size_t>(i)]);
  });
}
pe_status pe_checksum(const void* data, size_t bytes, uint64_t* sum) {
  return guarded([&] {
    check_pointer(data, "data");
    check_pointer(sum, "sum");
    if (bytes % 64) fail(PE_REQUEST, "%zu bytes; a checksum takes a multiple of 64", bytes);
    *sum = checksum(static_cast<const uint8_t*>(data), bytes);
  });
}

pe_status pe_rope_set(pe_backend* backend, int32_t* id, const float* table, int64_t positions, int32_t rotary_dim,
                      const float* q_scale) {
  return guarded([&] {
    check_pointer(backend, "backend");
    check_pointer(id, "id");
    check_pointer(table, "table");
    if (positions < 1 || rotary_dim < 2 || rotary_dim % 2)
      fail(PE_REQUEST, "rope table of %lld positions, rotary_dim %d", static_cast<long long>(positions), rotary_dim);
    if (*id >= 0) {
      const RopeTable& old = backend->rope(*id);
      if (old.rotary_dim != rotary_dim) fail(PE_REQUEST, "rotary_dim %d; the table has %d", rotary_dim, old.rotary_dim);
    }
    std::vector<float> values(table, table + positions * rotary_dim), scales;
    if (q_scale) scales.assign(q_scale, q_scale + positions);
    if (*id < 0) *id = put(backend->ropes, std::make_unique<RopeTable>());
    RopeTable& t = *backend->ropes[static_cast<size_t>(*id)];
    backend->rope_changes(t);
    t.positions = positions;
    t.rotary_dim = rotary_dim;
    t.values = std::move(values);
    t.q_scales = std::move(scales);
  });
}

pe_status pe_kv_create(pe_backend* backend, const pe_kv_desc* desc, int32_t* group) {
  return guarded([&] {
    check_pointer(backend, "backend");
    check_pointer(group, "group");
    *group = put(backend->kv_groups, backend->create_kv(checked(desc, "desc")));
  });
}
pe_status pe_kv_reserve(pe_backend* backend, int32_t group, int32_t blocks) {
  return guarded([&] {
    check_pointer(backend, "backend");
    backend->kv(group).reserve(blocks);
  });
}
pe_status pe_kv_block_bytes(pe_backend* backend, int32_t group, size_t* bytes) {
  return guarded([&] {
    check_pointer(backend, "backend");
    check_pointer(bytes, "bytes");
    *bytes = backend->kv(group).block_bytes();
  });
}

pe_status pe_program_create(pe_backend* backend, const pe_program_desc* desc, pe_program** out) {
  return guarded([&] {
    check_pointer(backend, "backend");
    check_pointer(out, "out");
    const auto& d = checked(desc, "desc");
    check_pointer(d.ops, "ops");
    check_pointer(d.buffers, "buffers");
    *out = new pe_program{backend->create_program(d)};
  });
}
pe_status pe_program_run(pe_program* program, const pe_batch* batch) {
  return guarded([&] {
    check_pointer(program, "program");
    program->program->run(checked(batch, "batch"));
  });
}
pe_status pe_program_times(pe_program* program, uint64_t* op_ns, uint64_t* runs, uint64_t* run_ns, int32_t reset) {
  return guarded([&] {
    check_pointer(program, "program");
    program->program->times(op_ns, runs, run_ns, reset != 0);
  });
}
pe_status pe_program_routing(pe_program* program, uint64_t* tokens, int64_t* count, int32_t reset) {
  return guarded([&] {
    check_pointer(program, "program");
    program->program->routing(tokens, count, reset != 0);
  });
}
pe_status pe_program_info(pe_program* program, size_t* arena_bytes, uint64_t* barriers, uint64_t* allocations) {
  return guarded([&] {
    check_pointer(program, "program");
    if (arena_bytes) *arena_bytes = program->program->arena_bytes();
    if (barriers) *barriers = program->program->barriers();
    if (allocations) *allocations = program->program->allocations();
  });
}
void pe_program_destroy(pe_program* program) { delete program; }

}  // extern "C"
