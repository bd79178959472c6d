// The instruction sets that kernels are written for, and which of them this processor has.
#pragma once

#include <vector>

namespace qfx::cpu {

enum class Isa {
  kRef,
  kAvx2,
  kAvxVnni,
  kAvxVnniInt8,
  kAvx512Vnni,
  kAmx,
  kNeon,
  kNeonDot,
  kNeonI8mm
};

const char* name_of(Isa isa);

// Those this library was compiled with, best first.
std::vector<Isa> compiled_isas();

// Whether this processor and its operating system have the instructions (processor.cpp).
bool supported(Isa isa);

}  // namespace qfx::cpu
