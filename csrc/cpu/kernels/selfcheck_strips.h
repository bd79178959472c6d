// The part of the self-check (selfcheck.h) for formats that finish a tile while they multiply.
#pragma once

#include <string>

#include "cpu/kernels/selfcheck_problem.h"
#include "cpu/kernels/tables/kernels.h"

namespace qfx::cpu {

// A sentence about strips of the format that compute something else than the reference, or an empty
// string.
std::string fault_of_strips(const Kernels& kernels, const Format& format, const Problem& problem);

}  // namespace qfx::cpu
