#include "memory.h"

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "fiber.h"
#include "scheduler.h"
#include "symbols.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define __asan_poison_memory_region(begin, bytes) ((void)0)
#define __asan_unpoison_memory_region(begin, bytes) ((void)0)
#endif

namespace cuda_emulation {

namespace {

constexpr size_t kAllocationAlignment = 256, kSharedAlignment = 128;

size_t round_up(size_t n, size_t step) { return (n + step - 1) / step * step; }
size_t page() {
  static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

// `bytes` that end at pages that cannot be touched, but for what the alignment takes; more of them in front.
constexpr size_t kGuardBytes = 64 << 20;
struct Guarded {
  char* mapped = nullptr;
  size_t mapped_bytes = 0, bytes = 0, slack = 0;
  char* data = nullptr;
};
Guarded map_guarded(size_t bytes, size_t alignment) {
  Guarded g;
  const size_t padded = round_up(bytes, alignment), pages = round_up(padded, page());
  g.mapped_bytes = pages + 2 * kGuardBytes;
  void* p = mmap(nullptr, g.mapped_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return {};
  g.mapped = static_cast<char*>(p);
  if (pages && mprotect(g.mapped + kGuardBytes, pages, PROT_READ | PROT_WRITE) != 0) {
    munmap(p, g.mapped_bytes);
    return {};
  }
  g.data = g.mapped + kGuardBytes + pages - padded;
  g.bytes = bytes;
  g.slack = padded - bytes;
  memset(g.data, kGarbage, padded);
  return g;
}

std::mutex allocations_lock;
std::map<const char*, Guarded> allocations;
size_t used_bytes = 0;

struct Shared {  // of a slot
  Guarded pages;
  char* data = nullptr;
  size_t bytes = 0, slack = 0;
  std::vector<char> variables;  // the static ones, while another block runs
};
Shared slots[2];
Shared* shared = slots;
std::vector<std::pair<char*, size_t>> static_shared;  // of the kernel that runs

// What a kernel did to be stopped; written by the signal handler, read where it lands.
char fault_text[160];
alignas(64) char landing_stack[64 << 10];

void land() { thread_error({nullptr, 0}, "%s", fault_text); }

void describe_fault(const void* address) {
  int thread = 0;
  const char* a = static_cast<const char*>(address);
  if (in_fiber_guard(address, &thread)) {
    snprintf(fault_text, sizeof fault_text, "the stack of thread %d is full", thread % kMaxThreads);
  } else if (a >= shared->pages.mapped && a < shared->pages.mapped + shared->pages.mapped_bytes) {
    snprintf(fault_text, sizeof fault_text, "access at byte %td of %zu bytes of shared memory", a - shared->data,
             shared->bytes);
  } else {
    for (const auto& [data, g] : allocations)
      if (a >= g.mapped && a < g.mapped + g.mapped_bytes) {
        snprintf(fault_text, sizeof fault_text, "access at byte %td of an allocation of %zu bytes", a - data, g.bytes);
        return;
      }
    snprintf(fault_text, sizeof fault_text, "access at %p, which is no memory (or not aligned)", address);
  }
}

thread_local char* alternate = nullptr;  // a stack for the handler
struct sigaction previous_segv, previous_bus;

void on_fault(int signal, siginfo_t* info, void* context) {
  if (!inside_kernel) {
    const struct sigaction& old = signal == SIGSEGV ? previous_segv : previous_bus;
    if (old.sa_flags & SA_SIGINFO)
      old.sa_sigaction(signal, info, context);
    else if (old.sa_handler != SIG_DFL && old.sa_handler != SIG_IGN)
      old.sa_handler(signal);
    else
      sigaction(signal, &old, nullptr);  // the access is tried again and ends the process
    return;
  }
  describe_fault(info->si_addr);
  int thread = 0;
  auto* machine = &static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  auto top = static_cast<uintptr_t>(machine->gregs[REG_RSP]) - 256;  // past the red zone
#else
  auto top = static_cast<uintptr_t>(machine->sp) - 256;
#endif
  if (in_fiber_guard(info->si_addr, &thread)) {
    __asan_unpoison_memory_region(landing_stack, sizeof landing_stack);  // frames of the last time
    top = reinterpret_cast<uintptr_t>(landing_stack + sizeof landing_stack - 64);
  }
  top = top / 16 * 16;
#if defined(__x86_64__)
  machine->gregs[REG_RIP] = reinterpret_cast<greg_t>(land);
  machine->gregs[REG_RSP] = static_cast<greg_t>(top - 8);
#else
  machine->pc = reinterpret_cast<uintptr_t>(land);
  machine->sp = top;
#endif
}

}  // namespace

void* device_allocate(size_t bytes) {
  std::lock_guard lock(allocations_lock);
  if (bytes > device_bytes_total() - used_bytes) return nullptr;
  const Guarded g = map_guarded(bytes, kAllocationAlignment);
  if (!g.mapped) return nullptr;
  __asan_poison_memory_region(g.data + g.bytes, g.slack);
  allocations[g.data] = g;
  used_bytes += bytes;
  return g.data;
}

bool device_free(void* p) {
  std::lock_guard lock(allocations_lock);
  const auto found = allocations.find(static_cast<char*>(p));
  if (found == allocations.end()) return false;
  const Guarded& g = found->second;
  __asan_unpoison_memory_region(g.data + g.bytes, g.slack);
  munmap(g.mapped, g.mapped_bytes);
  used_bytes -= g.bytes;
  allocations.erase(found);
  return true;
}

bool in_device_memory(const void* p, size_t bytes) {
  std::lock_guard lock(allocations_lock);
  auto after = allocations.upper_bound(static_cast<const char*>(p));
  if (after == allocations.begin()) return false;
  const Guarded& g = std::prev(after)->second;
  return static_cast<const char*>(p) + bytes <= g.data + g.bytes;
}

size_t device_bytes_used() { return used_bytes; }
size_t device_bytes_total() {
  const char* text = getenv("PYENGINE_CUDA_EMULATION_BYTES");
  return text ? strtoull(text, nullptr, 10) : size_t{4} << 30;
}

const void* host_pointer_in(const void* bytes, size_t size) {
  for (size_t i = 0; i + sizeof(uintptr_t) <= size; i += sizeof(uintptr_t)) {
    uintptr_t word;
    memcpy(&word, static_cast<const char*>(bytes) + i, sizeof word);
    // below 2^44 it is two numbers (AddressSanitizer maps addresses there)
    if (word >> 44 == 0 || word >> 47 || in_device_memory(reinterpret_cast<void*>(word), 0)) continue;
    const auto low = static_cast<uint32_t>(word);
    if (low < (1u << 20) || low % 4) continue;  // a number or a bool before what pads a struct, which can be anything
    unsigned char resident;
    void* its_page = reinterpret_cast<void*>(word / page() * page());
    if (mincore(its_page, 1, &resident) == 0) return reinterpret_cast<void*>(word);
  }
  return nullptr;
}

void begin_shared_memory(const void* kernel) { static_shared = shared_variables(kernel); }

void fill_shared_memory(int slot, size_t dynamic_bytes) {
  shared = &slots[slot];
  Guarded& pages = shared->pages;
  if (!pages.mapped) pages = map_guarded(kMaxSharedBytes, kSharedAlignment);
  __asan_unpoison_memory_region(pages.data, kMaxSharedBytes);
  const size_t padded = round_up(dynamic_bytes, kSharedAlignment);
  shared->data = pages.data + kMaxSharedBytes - padded;
  shared->bytes = dynamic_bytes;
  shared->slack = padded - dynamic_bytes;
  memset(shared->data, kGarbage, padded);
  // Under AddressSanitizer what the kernel did not ask for faults at once.
  __asan_poison_memory_region(shared->data + dynamic_bytes, shared->slack);
  __asan_poison_memory_region(pages.data, static_cast<size_t>(shared->data - pages.data));
  for (const auto& [variable, bytes] : static_shared) memset(variable, kGarbage, bytes);
}

void suspend_shared_memory(int slot) {
  slots[slot].variables.clear();
  for (const auto& [variable, bytes] : static_shared)
    slots[slot].variables.insert(slots[slot].variables.end(), variable, variable + bytes);
}
void resume_shared_memory(int slot) {
  shared = &slots[slot];
  const char* from = shared->variables.data();
  for (const auto& [variable, bytes] : static_shared) memcpy(variable, std::exchange(from, from + bytes), bytes);
}

bool in_shared_memory(const void* p, size_t bytes) {
  const char* a = static_cast<const char*>(p);
  if (a >= shared->pages.mapped && a < shared->pages.mapped + shared->pages.mapped_bytes)
    return a >= shared->data && a + bytes <= shared->data + shared->bytes;
  for (const auto& [variable, variable_bytes] : static_shared)
    if (a >= variable && a + bytes <= variable + variable_bytes) return true;
  return static_shared.empty() && !in_device_memory(p, 1) && !in_fiber_stack(p);  // where they lie is not known
}

const char* check_shared_memory() {
  __asan_unpoison_memory_region(shared->pages.data, kMaxSharedBytes);
  for (size_t i = 0; i < shared->slack; ++i)
    if (static_cast<uint8_t>(shared->data[shared->bytes + i]) != kGarbage)
      return "a thread wrote past the shared memory";
  return nullptr;
}

uint8_t* dynamic_shared_memory() { return reinterpret_cast<uint8_t*>(shared->data); }

void install_fault_handler() {
  static const bool installed = [] {
    struct sigaction action{};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    return sigaction(SIGSEGV, &action, &previous_segv) == 0 && sigaction(SIGBUS, &action, &previous_bus) == 0;
  }();
  if (!installed) abort();
  stack_t now{};
  if (alternate || sigaltstack(nullptr, &now) != 0 || !(now.ss_flags & SS_DISABLE)) return;
  alternate = static_cast<char*>(malloc(64 << 10));
  stack_t stack{};
  stack.ss_sp = alternate;
  stack.ss_size = 64 << 10;
  sigaltstack(&stack, nullptr);
}

}  // namespace cuda_emulation
