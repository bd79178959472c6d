// What this processor and its operating system can run.
#include "cpu/core/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__)
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#endif

namespace qfx::cpu {

#if defined(__x86_64__)
namespace {

// Linux saves the tiles of a process that has requested it; other systems are not queried.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}

// Whether register edx of leaf 7 of cpuid has these bits.
bool has(unsigned subleaf, unsigned bits) {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, subleaf, &a, &b, &c, &d) && (d & bits) == bits;
}

bool has_amx() {
  constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25;
  // Every processor with AMX rounds to bfloat16 by an instruction, which lines of its tiles use.
  return has(0, kTile | kInt8) && __builtin_cpu_supports("avx512bf16") && may_use_tiles();
}

// By number: GCC knows the name from version 13 on.
bool has_avxvnniint8() {
  constexpr unsigned kAvxVnniInt8 = 1u << 4;
  return has(1, kAvxVnniInt8);
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
#elif defined(__aarch64__)
namespace {

// By number: headers older than the processor do not know the names.
struct Feature {
  int auxv;  // AT_HWCAP or AT_HWCAP2 of Linux
  unsigned long bit;
  const char* sysctl;  // of macOS
};
constexpr Feature kDotProduct = {16, 1ul << 20, "hw.optional.arm.FEAT_DotProd"};
constexpr Feature kMatrixProduct = {26, 1ul << 13, "hw.optional.arm.FEAT_I8MM"};

bool has([[maybe_unused]] const Feature& feature) {
#if defined(__linux__)
  return (getauxval(feature.auxv) & feature.bit) != 0;
#elif defined(__APPLE__)
  int value = 0;
  size_t size = sizeof(value);
  return sysctlbyname(feature.sysctl, &value, &size, nullptr, 0) == 0 && value != 0;
#else
  return false;
#endif
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
    case Isa::kAvxVnniInt8:
      return has_avx2() && has_avxvnniint8();
    case Isa::kAvx512Vnni:
      return has_avx512vnni();
    case Isa::kAmx:
      return has_avx512vnni() && has_amx();
#elif defined(__aarch64__)
    case Isa::kNeon:
      return true;
    case Isa::kNeonDot:
      return has(kDotProduct);
    case Isa::kNeonI8mm:
      return has(kDotProduct) && has(kMatrixProduct);
#endif
    default:
      return isa == Isa::kRef;
  }
}

}  // namespace qfx::cpu
