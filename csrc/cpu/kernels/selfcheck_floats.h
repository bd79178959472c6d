// The self-check of float activations times int8 codes.
#pragma once

#include <string>

namespace qfx::cpu {

struct Kernels;

// What is wrong with them, or an empty string.
std::string fault_of_weight_only(const Kernels& kernels);

}  // namespace qfx::cpu
