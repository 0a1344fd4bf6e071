// Preloaded by tests: system calls on files of one folder that fail, or transfer less than was asked for; and another
// /sys, /proc/self/cgroup and CPU set than the machine has.
//
// A test sets the exported variables through ctypes. fault_folder: paths that begin with it count, "" = none.
// fault_call: the call that fails, by name. fault_at: which one from now on (1 = the next). fault_errno: with what; 0:
// every one transfers half of what it could, at least one byte. fault_hits: how many failed or were cut.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

char fault_folder[4096], fault_call[16];
int fault_at, fault_errno, fault_hits;

static void *next(const char *name) { return dlsym(RTLD_NEXT, name); }

static int ours(const char *path) {
  return fault_folder[0] && path && strncmp(path, fault_folder, strlen(fault_folder)) == 0;
}

static int our_file(int fd) {
  char link[64], path[4096];
  if (!fault_folder[0]) return 0;
  int kept = errno;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t count = readlink(link, path, sizeof path - 1);
  errno = kept;
  if (count <= 0) return 0;
  path[count] = 0;
  return ours(path);
}

static int fails(const char *call, int matches) {
  if (!matches || !fault_errno || strcmp(call, fault_call) != 0 || fault_at <= 0 || --fault_at) return 0;
  ++fault_hits;
  errno = fault_errno;
  return 1;
}

static size_t cut(const char *call, int matches, size_t count) {
  if (!matches || fault_errno || strcmp(call, fault_call) != 0 || count < 2) return count;
  ++fault_hits;
  return count / 2;
}

static const char *moved(const char *path, char *out) {
  const char *root = getenv("FAULT_ROOT");
  if (!root || (strncmp(path, "/sys/", 5) != 0 && strcmp(path, "/proc/self/cgroup") != 0)) return path;
  snprintf(out, 4096, "%s%s", root, path);
  return out;
}

#define OPEN(name)                                                        \
  int name(const char *path, int flags, ...) {                            \
    char other[4096];                                                     \
    va_list list;                                                         \
    va_start(list, flags);                                                \
    mode_t mode = va_arg(list, int);                                      \
    va_end(list);                                                         \
    if (fails("open", ours(path))) return -1;                             \
    int (*real)(const char *, int, ...) = next(#name);                    \
    return real(moved(path, other), flags, mode);                         \
  }
OPEN(open)
OPEN(open64)

#define TRANSFER(name, call, pointer)                                     \
  ssize_t name(int fd, pointer data, size_t count) {                      \
    int matches = our_file(fd);                                           \
    if (fails(call, matches)) return -1;                                  \
    ssize_t (*real)(int, pointer, size_t) = next(#name);                  \
    return real(fd, data, cut(call, matches, count));                     \
  }
TRANSFER(read, "read", void *)
TRANSFER(write, "write", const void *)

#define TRANSFER_AT(name, call, pointer)                                  \
  ssize_t name(int fd, pointer data, size_t count, off_t at) {            \
    int matches = our_file(fd);                                           \
    if (fails(call, matches)) return -1;                                  \
    ssize_t (*real)(int, pointer, size_t, off_t) = next(#name);           \
    return real(fd, data, cut(call, matches, count), at);                 \
  }
TRANSFER_AT(pread, "pread", void *)
TRANSFER_AT(pread64, "pread", void *)
TRANSFER_AT(pwrite, "pwrite", const void *)
TRANSFER_AT(pwrite64, "pwrite", const void *)

// Cut: the first part alone, or half of it where it is the only one there is; the forms with a 2 have flags.
#define TRANSFER_PARTS(name, call, parameter, argument)                             \
  ssize_t name(int fd, const struct iovec *parts, int count, off_t at parameter) {  \
    int matches = our_file(fd);                                                     \
    if (fails(call, matches)) return -1;                                            \
    ssize_t (*real)(int, const struct iovec *, int, off_t parameter) = next(#name); \
    struct iovec first = parts[0];                                                  \
    size_t all = count > 1 ? 2 * first.iov_len : first.iov_len;                     \
    size_t less = cut(call, matches, all);                                          \
    if (less == all) return real(fd, parts, count, at argument);                    \
    first.iov_len = less;                                                           \
    return real(fd, &first, 1, at argument);                                        \
  }
#define PARAMETER , int flags
#define ARGUMENT , flags
TRANSFER_PARTS(preadv, "pread", , )
TRANSFER_PARTS(preadv64, "pread", , )
TRANSFER_PARTS(preadv64v2, "pread", PARAMETER, ARGUMENT)
TRANSFER_PARTS(pwritev, "pwritev", , )
TRANSFER_PARTS(pwritev64, "pwritev", , )

int fsync(int fd) {
  if (fails("fsync", our_file(fd))) return -1;
  int (*real)(int) = next("fsync");
  return real(fd);
}

int rename(const char *from, const char *to) {
  if (fails("rename", ours(to))) return -1;
  int (*real)(const char *, const char *) = next("rename");
  return real(from, to);
}

int sched_getaffinity(pid_t pid, size_t bytes, cpu_set_t *set) {
  const char *cpus = getenv("FAULT_CPUS");
  if (cpus) {
    memset(set, 0, bytes);
    for (int cpu = 0; cpu < atoi(cpus); ++cpu) CPU_SET_S(cpu, bytes, set);
    return 0;
  }
  int (*real)(pid_t, size_t, cpu_set_t *) = next("sched_getaffinity");
  return real(pid, bytes, set);
}
