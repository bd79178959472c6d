// Rows of floats times one panel of int8 weights: equation (W1), as tables/weight_only.h says it.
#pragma once

#include <array>
#include <utility>

#include "cpu/kernels/tables/tiles.h"
#include "cpu/kernels/tables/weight_only.h"

#if defined(__AVX2__)
#include "cpu/kernels/rows/weight_only_wide.h"
#else
#include "cpu/kernels/rows/weight_only_plain.h"
#endif

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

template <int kHint, int... kLess>
constexpr void set_codes_tiles(CodesTileFn* tiles, std::integer_sequence<int, kLess...>) {
  ((tiles[kLess] = weight_only<kLess + 1, kHint>), ...);
}

template <int... kLess>
constexpr void set_float_tiles(WeightOnlyKernels& kernels, std::integer_sequence<int, kLess...>) {
  ((kernels.chains[kLess] = weight_only_chains<kLess + 1>), ...);
  ((kernels.scaled[kLess] = weight_only_scaled<kLess + 1>), ...);
}

constexpr WeightOnlyKernels weight_only_kernels() {
  constexpr auto kFew = std::make_integer_sequence<int, kFewFloatRows>();
  WeightOnlyKernels kernels = {};
  set_codes_tiles<kT0>(kernels.codes[kT0], kFew);
  set_codes_tiles<kT1>(kernels.codes[kT1], kFew);
  set_codes_tiles<kNta>(kernels.codes[kNta], kFew);
  kernels.floats_of_codes = floats_of_codes;
  set_float_tiles(kernels, std::make_integer_sequence<int, kMaxFloatRows>());
  return kernels;
}

constexpr WeightOnlyKernels kWeightOnlyKernels = weight_only_kernels();

}  // namespace
}  // namespace qfx::cpu
