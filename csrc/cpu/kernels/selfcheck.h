// Whether the kernels of an instruction set compute what they should on this machine.
#pragma once

#include <string>
#include <vector>

#include "cpu/kernels/tables/kernels.h"

namespace qfx::cpu {

// The formats an instruction set may choose from, each once.
std::vector<const Format*> formats_of(const Kernels& kernels);

// <format>_gemm_<rows>x32__<isa>
std::string kernel_name(const Kernels& kernels, const Format& format, int rows);

// Runs every tile on the extremes of the codes it is for, those of floats and the rotations on a
// few rows, in 0.2 to 4 milliseconds, and returns a sentence about the first that differs from the
// definition, (G1), (W1) or (R1), or an empty string.
std::string fault_of(const Kernels& kernels);

}  // namespace qfx::cpu
