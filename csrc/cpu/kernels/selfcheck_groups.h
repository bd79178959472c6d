// The self-check of tiles whose sums become floats group by group.
#pragma once

#include <string>

#include "cpu/kernels/selfcheck_problem.h"

namespace qfx::cpu {

struct Kernels;

// What is wrong with them, or an empty string; also where the format has none.
std::string fault_of_groups(const Kernels& kernels, const Format& format, const Problem& problem);

}  // namespace qfx::cpu
