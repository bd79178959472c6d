// In place of csrc/cpu/processor.cpp: a processor that has, beside what this one has, the
// instructions that this folder emulates.
#include "cpu/isa.h"

namespace qfx::cpu {

bool supported(Isa isa) {
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
  return isa == Isa::kRef || (isa == Isa::kAmx && avx512);
}

}  // namespace qfx::cpu
