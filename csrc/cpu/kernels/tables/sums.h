// Sums of products become outputs; float activations times int8 weights, whose sums are floats.
//
// Files of an instruction set are compiled with its flags, so this header holds plain C types only:
// an inline function shared with other files could carry wide instructions into them.
#pragma once

#include <cstdint>

#include "cpu/kernels/tables/groups.h"
#include "cpu/kernels/tables/panel.h"
#include "cpu/kernels/tables/weight_only.h"
#include "types.h"

namespace qfx::cpu {

using qfx::Activation;
using qfx::Dtype;

// The float parameters of one panel of columns, [32] each, zero padded.
struct Panel {
  float scale[kPanel], bias[kPanel];
  int32_t colsum[kPanel];
  bool has_bias;
};

// The same where the sums are floats, as float activations times int8 weights give them.
struct FloatPanel {
  float scale[kPanel], bias[kPanel];
  bool has_bias;
};

// Of products that are scaled already.
constexpr FloatPanel plain_panel() {
  FloatPanel panel = {};
  for (float& scale : panel.scale) scale = 1;
  return panel;
}

// Rows of an int32 tile [rows][32] -> out[m * ldo + n], n < columns. (E1)
struct EpilogueArgs {
  const int32_t* tile;
  int rows, columns;
  const int32_t *row_add, *row_mul;
  const float* row_scale;
  int64_t scale_stride;  // 1: one scale per row, 0: one for all
  const Panel* panel;
  Activation activation;
  Dtype dtype;
  void* out;
  int64_t ldo;
  // Outputs will not be read soon: whole lines of 64 bytes, which they are, may go to memory
  // without being read into the caches. An epilogue need not do it.
  bool past_caches = false;
  // Of the type of the outputs and with rows that lie as theirs do, added before the activation; or
  // null.
  const char* residual = nullptr;
};

// Rows of float sums [rows][32] -> out[m * ldo + n], n < columns:
//     act(sums * (row_scale * scale) + bias + residual)
struct FloatEpilogueArgs {
  const float* sums;
  int rows, columns;
  const float* row_scale;
  int64_t scale_stride;  // 1: one scale per row, 0: one for all
  const FloatPanel* panel;
  Activation activation;
  Dtype dtype;
  void* out;
  int64_t ldo;
  bool past_caches = false;
  const char* residual = nullptr;
};

struct SumKernels {
  void (*epilogue)(const EpilogueArgs* args);
  // Of raw sums [groups][rows][32].
  void (*add_groups)(const int32_t* raw, int64_t groups, int rows, const GroupTerms* terms);
  const WeightOnlyKernels* weight_only;
  void (*finish_floats)(const FloatEpilogueArgs* args);
};

}  // namespace qfx::cpu
