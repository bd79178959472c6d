// The self-check of kernels on codes of 4 and 5 bits.
#pragma once

#include <string>

namespace qfx::cpu {

struct Kernels;

// What is wrong with them, or an empty string.
std::string fault_of_lowbit(const Kernels& kernels);

}  // namespace qfx::cpu
