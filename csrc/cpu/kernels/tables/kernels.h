// What every instruction set provides: its kernels on floats, by family, and its formats.
#pragma once

#include "cpu/kernels/tables/tiles.h"

namespace qfx::cpu {

struct RowKernels;
struct SumKernels;
struct AttentionKernels;
struct LowbitKernels;

struct Kernels {
  const char* isa;
  const RowKernels* row;
  const SumKernels* sums;
  const AttentionKernels* attention;
  const LowbitKernels* lowbit;
  const Format* formats[kOperandKinds];  // by Operands; the same one where there is nothing faster
};

#define QFX_ISA(isa, name) const Kernels& kernels_##name();
#include "cpu/core/isas.inc"
#undef QFX_ISA

}  // namespace qfx::cpu
