// The kernels of the instruction set in force.
#pragma once

#include "cpu/isa.h"
#include "cpu/kernels.h"

namespace qfx::cpu {

const Kernels& kernels_of(Isa isa);

}  // namespace qfx::cpu
