// In place of csrc/cpu/core/processor.cpp: a processor that has, beside what this one has, the
// instructions that this folder emulates.
#include "cpu/core/isa.h"

namespace qfx::cpu {

bool supported(Isa isa) {
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
  switch (isa) {
    case Isa::kAmx:  // beside its tiles, the kernels of AVX-512
      return avx512;
    case Isa::kAvxVnniInt8:
      return avx2;
    default:
      return isa == Isa::kRef;
  }
}

}  // namespace qfx::cpu
