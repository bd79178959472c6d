// Which instruction set the kernels run on: the best the machine has, or a lower one by force
// (environment variable QFX_CPU_ISA at load, set_isa at run time).
#pragma once

#include <string>
#include <vector>

namespace qfx::cpu {

enum class Isa { kRef, kAvx2, kAvx512Vnni };

const char* name_of(Isa isa);

// Those this library was compiled with, best first.
std::vector<Isa> compiled_isas();

bool supported(Isa isa);

// Supported on this machine, best first; kRef is always among them.
std::vector<Isa> supported_isas();

Isa current_isa();

// Throws std::invalid_argument with the supported names for a name that is not among them.
void set_isa(const std::string& name);

}  // namespace qfx::cpu
