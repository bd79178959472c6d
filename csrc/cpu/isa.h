// Which instruction set the kernels run on: the best the machine has whose kernels pass their
// self-check (selfcheck.h), or a lower one by force (environment variable QFX_CPU_ISA at load,
// set_isa at run time).
#pragma once

#include <string>
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

// Supported on this machine and found right, best first; kRef is always among them.
const std::vector<Isa>& usable_isas();

// A sentence for each supported instruction set whose kernels are wrong here and not used.
const std::vector<std::string>& faults();

Isa current_isa();

// Throws std::invalid_argument with the usable names for a name that is not among them.
void set_isa(const std::string& name);

}  // namespace qfx::cpu
