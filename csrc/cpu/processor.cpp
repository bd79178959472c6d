// What this processor and its operating system can run.
#include "cpu/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace qfx::cpu {

#if defined(__x86_64__)
namespace {

// Linux saves the tiles of a process that has asked for it; other systems are not asked.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}

bool has_amx() {
  constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25;
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  return (d & kTile) && (d & kInt8) && may_use_tiles();
}

// libgcc and compiler-rt also check that the operating system saves the wide registers.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

bool has_avx512vnni() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}

}  // namespace
#endif

bool supported(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::kAvx2:
      return has_avx2();
    case Isa::kAvxVnni:
      return has_avx2() && __builtin_cpu_supports("avxvnni");
    case Isa::kAvx512Vnni:
      return has_avx512vnni();
    case Isa::kAmx:
      return has_avx512vnni() && has_amx();
#endif
    default:
      return isa == Isa::kRef;
  }
}

}  // namespace qfx::cpu
