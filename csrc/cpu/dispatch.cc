#include "cpu/dispatch.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <string>

#include "core/status.h"

namespace pe {

extern const KernelTable kernels_scalar;
#if defined(__x86_64__)
extern const KernelTable kernels_avx2;
extern const KernelTable kernels_avxvnni;
extern const KernelTable kernels_avx512vnni;
extern const KernelTable kernels_avx512vnni_amx;
#elif defined(__aarch64__)
extern const KernelTable kernels_neon;
extern const KernelTable kernels_neon_dotprod;
extern const KernelTable kernels_neon_i8mm;
#endif
#if defined(PYENGINE_TEST_ISAS)
extern const KernelTable kernels_avxvnni_evex;
extern const KernelTable kernels_avx512vnni_amx_emulated;
#endif

namespace {

struct Feature {
  const char* name;
  bool present;
};

#if defined(__x86_64__)
// EAX of CPUID leaf 7, subleaf 1; __builtin_cpu_supports of older compilers does not know what is there.
bool leaf7_1_eax(int bit) {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> bit & 1);
}

// AMX: the CPU has tiles and int8 products on them, the system saves both parts of their state (XCR0 bits 17 and 18),
// and Linux grants this process the use of it (arch_prctl, ARCH_REQ_XCOMP_PERM), without which the first tile is a
// SIGILL.
bool amx_int8() {
#if defined(__linux__)
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return false;  // OSXSAVE: xgetbv may be used
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 24 & 1) || !(d >> 25 & 1)) return false;
  unsigned xcr0, high;
  __asm__ __volatile__("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
  constexpr unsigned kTileState = 3u << 17;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return (xcr0 & kTileState) == kTileState && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#elif defined(__aarch64__)
// Bits of Linux's asm/hwcap.h, which may be older than the CPU.
bool hwcap(unsigned long type, int bit) {
#if defined(__linux__)
  return getauxval(type) >> bit & 1;
#else
  return false;
#endif
}
#endif

// Every feature that an implementation asks for, usable: the CPU has it and the operating system saves its registers.
std::span<const Feature> features() {
#if defined(__x86_64__)
#define PE_FEATURE(name) {name, __builtin_cpu_supports(name) != 0}
  static const Feature list[] = {
      PE_FEATURE("sse4.2"),
      PE_FEATURE("avx"),
      PE_FEATURE("avx2"),
      PE_FEATURE("fma"),
      {"avxvnni", __builtin_cpu_supports("avx2") && leaf7_1_eax(4)},
      PE_FEATURE("avx512f"),
      PE_FEATURE("avx512bw"),
      PE_FEATURE("avx512vl"),
      PE_FEATURE("avx512dq"),
      PE_FEATURE("avx512vnni"),
      PE_FEATURE("avx512bf16"),
      {"amx-int8", amx_int8()},
  };
#undef PE_FEATURE
#elif defined(__aarch64__)
  static const Feature list[] = {{"asimd", true}, {"asimddp", hwcap(AT_HWCAP, 20)}, {"i8mm", hwcap(AT_HWCAP2, 13)}};
#else
  static const Feature list[] = {{"none", true}};
#endif
  return list;
}

bool has(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    bool found = false;
    for (const Feature& f : features()) found = found || (f.present && std::strcmp(f.name, name) == 0);
    if (!found) return false;
  }
  return true;
}

#if defined(__x86_64__)
constexpr std::initializer_list<const char*> kAvx512Vnni = {"avx512f",  "avx512bw",   "avx512vl",
                                                            "avx512dq", "avx512vnni", "fma"};
#endif

std::string names_of(bool available_only) {
  std::string text;
  for (const auto& one : implementations())
    if (one.available || !available_only) text += std::string(text.empty() ? "" : ", ") + one.name;
  return text;
}

}  // namespace

std::span<const Implementation> implementations() {
  static const Implementation list[] = {
      {"scalar", &kernels_scalar, true},
#if defined(PYENGINE_TEST_ISAS)
      {"avxvnni_evex", &kernels_avxvnni_evex, has(kAvx512Vnni)},
      {"avx512vnni_amx_emulated", &kernels_avx512vnni_amx_emulated, has(kAvx512Vnni)},
#endif
#if defined(__x86_64__)
      {"avx2", &kernels_avx2, has({"avx2", "fma"})},
      {"avxvnni", &kernels_avxvnni, has({"avx2", "fma", "avxvnni"})},
      // before avx512vnni, so that it must be asked for, until a CPU that has it has run the tests
      {"avx512vnni_amx", &kernels_avx512vnni_amx, has(kAvx512Vnni) && has({"amx-int8"})},
      {"avx512vnni", &kernels_avx512vnni, has(kAvx512Vnni)},
#elif defined(__aarch64__)
      {"neon", &kernels_neon, true},
      {"neon_dotprod", &kernels_neon_dotprod, has({"asimddp"})},
      {"neon_i8mm", &kernels_neon_i8mm, has({"asimddp", "i8mm"})},
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
        fail(PE_RESOURCE, "ISA '%s' is not available on this CPU; expected one of %s", name, names_of(true).c_str());
      return *one.table;
    }
  }
  fail(PE_RESOURCE, "ISA '%.100s' is unknown; expected one of %s", name ? name : "", names_of(false).c_str());
}

const char* cpu_features() {
  static const struct Names {
    char text[512] = "";
    Names() {
      for (const Feature& f : features()) {
        if (!f.present) continue;
        const size_t at = std::strlen(text);
        std::snprintf(text + at, sizeof text - at, "%s%s", at ? " " : "", f.name);
      }
    }
  } names;
  return names.text;
}

}  // namespace pe
