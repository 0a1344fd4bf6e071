// How many threads by default. Nothing here allocates: it is called where no error can be reported.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "cpu/dispatch.h"

#if defined(__linux__)
#include <fcntl.h>
#include <sched.h>
#include <unistd.h>
#endif

namespace pe {

#if defined(__linux__)
namespace {

constexpr size_t kTextBytes = 4096;

// The beginning of a file; false where it cannot be read.
bool read_text(const char* path, char (&text)[kTextBytes]) {
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  size_t at = 0;
  for (;;) {
    const ssize_t count = read(fd, text + at, kTextBytes - 1 - at);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    at += static_cast<size_t>(count);
  }
  close(fd);
  text[at] = '\0';
  return at > 0;
}

// The first CPU of a list such as "0-3,8" that is in `set`; -1 if none is.
int first_of(const char* list, const cpu_set_t& set) {
  while (*list >= '0' && *list <= '9') {
    char* end;
    const long first = std::strtol(list, &end, 10), last = *end == '-' ? std::strtol(end + 1, &end, 10) : first;
    for (long cpu = first; cpu <= std::min<long>(last, CPU_SETSIZE - 1); ++cpu)
      if (CPU_ISSET(static_cast<size_t>(cpu), &set)) return static_cast<int>(cpu);
    list = *end == ',' ? end + 1 : end;
  }
  return -1;
}

// Cores among the CPUs this process may use: of the threads of a core the first counts.
int physical_cores(const cpu_set_t& set) {
  int cores = 0;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(static_cast<size_t>(cpu), &set)) continue;
    char path[128], siblings[kTextBytes];
    std::snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
    cores += !read_text(path, siblings) || first_of(siblings, set) == cpu;
  }
  return cores;
}

// Whole CPUs, at least one, of the quota of the cgroup in `folder`; 0 where there is none.
int quota_of(const char* folder, bool v2) {
  char path[kTextBytes + 64], text[kTextBytes];
  double quota = 0, period = 0;
  if (v2) {  // "150000 100000", or "max 100000"
    std::snprintf(path, sizeof path, "%s/cpu.max", folder);
    if (!read_text(path, text) || std::sscanf(text, "%lf %lf", &quota, &period) != 2) return 0;
  } else {
    std::snprintf(path, sizeof path, "%s/cpu.cfs_quota_us", folder);
    if (!read_text(path, text) || std::sscanf(text, "%lf", &quota) != 1) return 0;
    std::snprintf(path, sizeof path, "%s/cpu.cfs_period_us", folder);
    if (!read_text(path, text) || std::sscanf(text, "%lf", &period) != 1) return 0;
  }
  if (!(quota > 0) || !(period > 0)) return 0;
  return static_cast<int>(std::clamp(quota / period, 1.0, 1e6));
}

bool names_cpu(const char* controllers) {
  for (const char* at = controllers; (at = std::strstr(at, "cpu")) != nullptr; at += 3)
    if ((at == controllers || at[-1] == ',') && (at[3] == '\0' || at[3] == ',')) return true;
  return false;
}

// The tightest quota of this process's cgroup and of those above it, v2 and v1. What /proc/self/cgroup names may lie
// outside of what is mounted here; then the mounted root counts.
int cgroup_cpus() {
  char groups[kTextBytes];
  if (!read_text("/proc/self/cgroup", groups)) std::strcpy(groups, "0::/\n1:cpu:/\n");
  int tightest = 0;
  char* rest = groups;
  while (char* line = strtok_r(rest, "\n", &rest)) {  // "0::/path" is v2, "4:cpu,cpuacct:/path" v1
    char* controllers = std::strchr(line, ':');
    char* group = controllers ? std::strchr(controllers + 1, ':') : nullptr;
    if (!group) continue;
    *group++ = '\0';
    const bool v2 = *++controllers == '\0';
    if (!v2 && !names_cpu(controllers)) continue;
    for (;;) {
      char folder[kTextBytes + 32];
      std::snprintf(folder, sizeof folder, "/sys/fs/cgroup%s%s", v2 ? "" : "/cpu", group);
      const int cpus = quota_of(folder, v2);
      if (cpus > 0 && (tightest == 0 || cpus < tightest)) tightest = cpus;
      char* slash = std::strrchr(group, '/');
      if (!slash) break;
      *slash = '\0';
    }
  }
  return tightest;
}

}  // namespace
#endif

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
