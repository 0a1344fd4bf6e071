#include "cpu/dispatch.h"

#if defined(__linux__)
#include <sched.h>
#endif

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

#include "core/status.h"

namespace pe {

extern const KernelTable kernels_scalar;
#if defined(__x86_64__)
extern const KernelTable kernels_avx2;
extern const KernelTable kernels_avx512vnni;
#endif

const std::vector<Implementation>& implementations() {
  static const std::vector<Implementation> list = {
      {"scalar", &kernels_scalar, true},
#if defined(__x86_64__)
      // __builtin_cpu_supports looks at CPUID and at what the operating system saves (XCR0)
      {"avx2", &kernels_avx2, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
      {"avx512vnni", &kernels_avx512vnni,
       __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma")},
#endif
  };
  return list;
}

const KernelTable& choose_kernels(const char* name) {
  const auto& list = implementations();
  if (!name || !*name) {
    for (size_t i = list.size(); i-- > 0;)
      if (list[i].available) return *list[i].table;
  } else {
    for (const auto& one : list) {
      if (std::strcmp(one.name, name) != 0) continue;
      if (!one.available)
        fail(PE_RESOURCE, "ISA '%s' is not available on this CPU (it has: %s)", name, cpu_features().c_str());
      return *one.table;
    }
  }
  std::string known;
  for (const auto& one : list) known += std::string(known.empty() ? "" : ", ") + one.name;
  fail(PE_RESOURCE, "ISA '%.100s' is unknown; expected one of %s", name ? name : "", known.c_str());
}

const std::string& cpu_features() {
  static const std::string text = [] {
    std::string s;
#if defined(__x86_64__)
#define PE_FEATURE(name) \
  if (__builtin_cpu_supports(name)) s += std::string(s.empty() ? "" : " ") + name
    PE_FEATURE("sse4.2");
    PE_FEATURE("avx");
    PE_FEATURE("avx2");
    PE_FEATURE("fma");
    PE_FEATURE("avx512f");
    PE_FEATURE("avx512bw");
    PE_FEATURE("avx512vl");
    PE_FEATURE("avx512dq");
    PE_FEATURE("avx512vnni");
    PE_FEATURE("avx512bf16");
#undef PE_FEATURE
#elif defined(__aarch64__)
    s = "neon";
#endif
    return s;
  }();
  return text;
}

namespace {

#if defined(__linux__)
// Cores among the CPUs this process may use: threads of one core count once.
int physical_cores(const cpu_set_t& set) {
  std::set<std::string> cores;
  int unknown = 0;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &set)) continue;
    char path[128];
    std::snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
    std::ifstream file(path);
    std::string siblings;
    if (std::getline(file, siblings))
      cores.insert(siblings);
    else
      ++unknown;
  }
  return static_cast<int>(cores.size()) + unknown;
}

// Whole CPUs of the cgroup's quota (v2, then v1), 0 where there is none.
int cgroup_cpus() {
  double quota = 0, period = 0;
  std::string line, first;
  std::ifstream v2("/sys/fs/cgroup/cpu.max");
  if (std::getline(v2, line)) {
    std::istringstream words(line);
    if (!(words >> first >> period) || first == "max") return 0;
    quota = std::strtod(first.c_str(), nullptr);
  } else {
    std::ifstream q("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), p("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
    if (!(q >> quota) || !(p >> period) || quota <= 0) return 0;
  }
  if (period <= 0) return 0;
  const int whole = static_cast<int>(quota / period);
  return whole > 0 ? whole : 1;
}
#endif

}  // namespace

int default_threads() {
  int n = static_cast<int>(std::thread::hardware_concurrency());
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) n = physical_cores(set);
  const int quota = cgroup_cpus();
  if (quota > 0 && quota < n) n = quota;
#endif
  return n > 0 ? n : 1;
}

}  // namespace pe
