// Every allocation, mapping and thread of the core fails once: each failure is PE_RESOURCE with a message, the call
// works when it is made again, the results have the bits of a run without failures, and nothing is leaked.
//
//   core_faults
//
// operator new, mmap and pthread_create are replaced here, and the library's calls come here too.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <functional>
#include <new>
#include <optional>

#include "c_client.h"

namespace {

// The n-th from now fails (`onward`: and all after it); 0 and below: none.
std::atomic<long> countdown{0};
std::atomic<bool> onward{false}, failed{false};
std::atomic<long> live{0};  // allocations, mappings and threads in use

bool fails() {
  if (failed && onward) return true;
  if (countdown.load() <= 0 || countdown.fetch_sub(1) != 1) return false;
  failed = true;
  return true;
}

void arm(long n, bool all) {
  failed = false;
  onward = all;
  countdown = n;
}

void disarm() {
  countdown = 0;
  failed = false;
}

}  // namespace

void* operator new(size_t bytes) {
  void* p = fails() ? nullptr : std::malloc(bytes ? bytes : 1);
  if (!p) throw std::bad_alloc();
  ++live;
  return p;
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  void* p = fails() ? nullptr : std::malloc(bytes ? bytes : 1);
  live += p != nullptr;
  return p;
}
void* operator new(size_t bytes, std::align_val_t align) {
  void* p = nullptr;
  if (fails() || posix_memalign(&p, static_cast<size_t>(align), bytes) != 0) throw std::bad_alloc();
  ++live;
  return p;
}
void operator delete(void* p) noexcept {
  live -= p != nullptr;
  std::free(p);
}
void operator delete(void* p, size_t) noexcept { operator delete(p); }
void operator delete(void* p, std::align_val_t) noexcept { operator delete(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { operator delete(p); }

extern "C" {
void* mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) noexcept {
  if (fails()) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  void* p = reinterpret_cast<void*>(syscall(SYS_mmap, at, bytes, protection, flags, fd, offset));
  live += p != MAP_FAILED;
  return p;
}
int munmap(void* at, size_t bytes) noexcept {
  --live;
  return static_cast<int>(syscall(SYS_munmap, at, bytes));
}
int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*), void* argument) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto real = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  return fails() ? EAGAIN : real(thread, attributes, start, argument);
}
}

namespace {

constexpr int64_t kRows = 48, kCols = 96;
constexpr int32_t kDim = 16, kContext = 300, kQkv = 3 * kDim;  // one head; two partitions of keys

// All that the steps make. What a step needs of its own is static: the failures are the core's alone.
struct State {
  pe_backend* backend = nullptr;
  pe_program *linear = nullptr, *attention = nullptr;
  int32_t weight = -1, floats = -1, rope = -1, kv = -1, ids[2] = {-1, -1};
  float products[kRows] = {}, heads[kContext * kDim] = {}, last[kDim] = {};
  int fd = -1;

  ~State() {
    pe_program_destroy(linear);
    pe_program_destroy(attention);
    pe_backend_destroy(backend);
  }
};

struct Step {
  const char* what;
  std::function<pe_status(State&)> run;
};

pe_status program(State& s, const pe_op* ops, int32_t count, const pe_buffer_desc* buffers, int32_t buffer_count,
                  int32_t tokens, pe_program** out) {
  auto desc = sized<pe_program_desc>();
  desc.op_count = count;
  desc.buffer_count = buffer_count;
  desc.ops = ops;
  desc.buffers = buffers;
  desc.max_batch_tokens = tokens;
  desc.max_sequences = 1;
  return pe_program_create(s.backend, &desc, out);
}

pe_status run(pe_program* p, const float* hidden, int32_t first, int32_t tokens, float* tap) {
  static int32_t positions[kContext], table[kContext / PE_KV_BLOCK + 1];
  for (int32_t t = 0; t < tokens; ++t) positions[t] = first + t;
  for (int32_t b = 0; b <= kContext / PE_KV_BLOCK; ++b) table[b] = b;
  const int32_t ends[] = {0, tokens};
  const int32_t* tables[] = {table};
  float* taps[] = {tap};
  auto b = sized<pe_batch>();
  b.tokens = tokens;
  b.sequences = 1;
  b.positions = positions;
  b.query_start = ends;
  b.hidden = hidden;
  b.block_tables = tables;
  b.block_table_width = kContext / PE_KV_BLOCK + 1;
  b.taps = taps;
  return pe_program_run(p, &b);
}

pe_status create(State& s) {
  auto config = sized<pe_backend_config>();
  config.threads = 3;
  return pe_backend_create(&config, &s.backend);
}

pe_status tensor(State& s, int32_t format, int32_t group, int32_t* id) {
  auto desc = sized<pe_tensor_desc>();
  desc.format = format;
  desc.group = group;
  desc.rows = kRows;
  desc.cols = kCols;
  return pe_tensor_create(s.backend, &desc, id);
}

pe_status pack(State& s, int32_t id, const std::vector<float>& source) {
  auto args = sized<pe_pack_args>();
  args.source = source.data();
  args.rows = kRows;
  args.panel_stride = 1;
  return pe_tensor_pack(s.backend, id, &args);
}

pe_status linear_program(State& s) {
  pe_op ops[] = {make_op(PE_OP_LOAD_HIDDEN, -1, 0), make_op(PE_OP_QUANTIZE, 0, 1), make_op(PE_OP_LINEAR, 1, 2),
                 make_op(PE_OP_TAP, 2, -1)};
  ops[2].weight = s.weight;
  const pe_buffer_desc buffers[] = {make_buffer(kCols), make_buffer(kCols, true), make_buffer(kRows)};
  return program(s, ops, 4, buffers, 3, 1, &s.linear);
}

pe_status attention_program(State& s) {
  pe_op ops[] = {make_op(PE_OP_LOAD_HIDDEN, -1, 0), make_op(PE_OP_ROPE, 0, -1), make_op(PE_OP_KV_APPEND, 0, -1),
                 make_op(PE_OP_ATTENTION, 0, 1), make_op(PE_OP_TAP, 1, -1)};
  for (int i = 1; i < 4; ++i) {
    ops[i].heads = ops[i].kv_heads = 1;
    ops[i].head_dim = kDim;
    ops[i].rope = s.rope;
    ops[i].kv_group = s.kv;
    ops[i].kv_layer = 0;
    ops[i].scale = 0.25f;
  }
  const pe_buffer_desc buffers[] = {make_buffer(kQkv), make_buffer(kDim)};
  return program(s, ops, 5, buffers, 2, kContext, &s.attention);
}

pe_status map_back(State& s) {
  pe_tensor_desc descs[2] = {sized<pe_tensor_desc>(), sized<pe_tensor_desc>()};
  for (auto& d : descs) {
    d.rows = kRows;
    d.cols = kCols;
  }
  descs[0].format = PE_INT4_MIN;
  descs[0].group = 32;
  descs[1].format = PE_F32;
  auto file = sized<pe_tensor_file>();
  file.fd = s.fd;
  file.offset = 64;
  file.count = 2;
  file.ids = s.ids;
  file.descs = descs;
  return pe_tensors_map(s.backend, &file);
}

std::vector<Step> steps() {
  static Random random(7);
  static const std::vector<float> matrix = random.normal(kRows * kCols), row = random.normal(kCols);
  static const std::vector<float> hidden = random.normal(kContext * kQkv), table = random.normal(kContext * kDim);
  return {
      {"backend", create},
      {"tensor", [](State& s) { return tensor(s, PE_INT4_MIN, 32, &s.weight); }},
      {"tensor of floats", [](State& s) { return tensor(s, PE_F32, 0, &s.floats); }},
      {"pack", [](State& s) { return pack(s, s.weight, matrix); }},
      {"pack floats", [](State& s) { return pack(s, s.floats, matrix); }},
      {"rope", [](State& s) { return pe_rope_set(s.backend, &s.rope, table.data(), kContext, kDim, table.data()); }},
      {"longer rope", [](State& s) { return pe_rope_set(s.backend, &s.rope, table.data(), kContext, kDim, nullptr); }},
      {"kv",
       [](State& s) {
         auto desc = sized<pe_kv_desc>();
         desc.layers = desc.kv_heads = 1;
         desc.k_dim = desc.v_dim = kDim;
         desc.dtype = PE_KV_BF16;
         return pe_kv_create(s.backend, &desc, &s.kv);
       }},
      {"reserve", [](State& s) { return pe_kv_reserve(s.backend, s.kv, 4); }},
      {"reserve more", [](State& s) { return pe_kv_reserve(s.backend, s.kv, kContext / PE_KV_BLOCK + 1); }},
      {"program", linear_program},
      {"program of attention", attention_program},
      {"run", [](State& s) { return run(s.linear, row.data(), 0, 1, s.products); }},
      {"prefill", [](State& s) { return run(s.attention, hidden.data(), 0, kContext - 1, s.heads); }},
      {"decode", [](State& s) { return run(s.attention, hidden.data(), kContext - 1, 1, s.last); }},
      {"gather",
       [](State& s) {
         const int32_t ids[] = {s.weight, s.floats};
         return pe_tensors_gather(s.backend, ids, 2);
       }},
      {"write",
       [](State& s) {
         int32_t ids[] = {s.weight, s.floats};
         auto file = sized<pe_tensor_file>();
         file.fd = s.fd;
         file.offset = 64;
         file.count = 2;
         file.ids = ids;
         uint64_t bytes;
         return pe_tensors_write(s.backend, &file, &bytes);
       }},
      {"map", map_back},
      {"limit",
       [](State& s) {
         double rate;
         auto args = sized<pe_limit_args>();
         args.limit = PE_LIMIT_READ;
         args.work = 1 << 16;
         args.passes = 1;
         args.per_second = &rate;
         return pe_limit_measure(s.backend, &args);
       }},
      {"a refusal",
       [](State& s) {
         const pe_status status = pe_kv_reserve(s.backend, 99, 1);
         return status == PE_REQUEST ? PE_OK : status;
       }},
  };
}

// Runs all steps. With `step` >= 0 the n-th allocation of that step fails; false if the step makes fewer.
bool all_steps(const std::vector<Step>& list, State& s, int step, long n, bool all) {
  bool reached = step < 0;
  for (int i = 0; i < static_cast<int>(list.size()); ++i) {
    if (i != step) {
      good(list[static_cast<size_t>(i)].run(s));
      continue;
    }
    arm(n, all);
    const pe_status status = list[static_cast<size_t>(i)].run(s);
    reached = failed;
    disarm();
    const std::string message = status == PE_OK ? "" : pe_last_error();
    if (status == PE_OK) continue;  // not reached, or what failed was not needed
    if (status != PE_RESOURCE || message.empty() || !reached) {
      std::fprintf(stderr, "%s, allocation %ld: status %d, '%s'; expected PE_RESOURCE and a message\n",
                   list[static_cast<size_t>(i)].what, n, static_cast<int>(status), message.c_str());
      std::exit(1);
    }
    good(list[static_cast<size_t>(i)].run(s));
  }
  return reached;
}

}  // namespace

int main() {
  const std::vector<Step> list = steps();
  const int fd = static_cast<int>(syscall(SYS_memfd_create, "core_faults", 0));
  if (fd < 0) {
    std::perror("memfd_create");
    return 1;
  }
  std::optional<State> expected(std::in_place);
  expected->fd = fd;
  all_steps(list, *expected, -1, 0, false);
  int tried = 0;
  for (const bool all : {false, true})
    for (int step = 0; step < static_cast<int>(list.size()); ++step)
      for (long n = 1;; ++n) {
        if (ftruncate(fd, 0) != 0) return 1;
        std::optional<State> s(std::in_place);
        s->fd = fd;
        const long before = live;
        const bool reached = all_steps(list, *s, step, n, all);
        if (std::memcmp(s->products, expected->products, sizeof s->products) != 0 ||
            std::memcmp(s->heads, expected->heads, sizeof s->heads) != 0 ||
            std::memcmp(s->last, expected->last, sizeof s->last) != 0) {
          std::fprintf(stderr, "%s, allocation %ld: other results\n", list[static_cast<size_t>(step)].what, n);
          return 1;
        }
        s.reset();
        if (live != before) {
          std::fprintf(stderr, "%s, allocation %ld: %ld left behind\n", list[static_cast<size_t>(step)].what, n,
                       live - before);
          return 1;
        }
        if (!reached) break;
        ++tried;
      }
  std::printf("%d failures in %zu steps\n", tried, list.size());
  return tried > 50 ? 0 : 1;
}
