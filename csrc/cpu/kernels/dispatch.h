// Which kernels run: those of the best instruction set the machine has whose kernels pass their
// self-check (selfcheck.h), or of a lower one by force (environment variable QFX_CPU_ISA at load,
// set_isa at run time).
#pragma once

#include <string>
#include <vector>

#include "cpu/core/isa.h"
#include "cpu/kernels/tables/kernels.h"

namespace qfx::cpu {

const Kernels& kernels_of(Isa isa);

// Supported on this machine and found right, best first; kRef is always among them.
const std::vector<Isa>& usable_isas();

// A sentence for each supported instruction set whose kernels are wrong here and not used.
const std::vector<std::string>& faults();

Isa current_isa();

// Throws std::invalid_argument with the usable names for a name that is not among them.
void set_isa(const std::string& name);

}  // namespace qfx::cpu
