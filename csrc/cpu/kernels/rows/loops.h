// The kernels on rows of floats, which are written once as plain loops and which each instruction
// set's file compiles with its own flags. The same bits on all of them.
#pragma once

#include "cpu/kernels/rows/cache_few.h"
#include "cpu/kernels/rows/cache_panels.h"
#include "cpu/kernels/rows/cache_rows.h"
#include "cpu/kernels/rows/cache_score.h"
#include "cpu/kernels/rows/columns.h"
#include "cpu/kernels/rows/decode.h"
#include "cpu/kernels/rows/depthwise.h"
#include "cpu/kernels/rows/epilogue.h"
#include "cpu/kernels/rows/gates.h"
#include "cpu/kernels/rows/group_codes.h"
#include "cpu/kernels/rows/groups.h"
#include "cpu/kernels/rows/interleave.h"
#include "cpu/kernels/rows/lowbit.h"
#include "cpu/kernels/rows/panel_codes.h"
#include "cpu/kernels/rows/quantize.h"
#include "cpu/kernels/rows/random.h"
#include "cpu/kernels/rows/range.h"
#include "cpu/kernels/rows/rotate.h"
#include "cpu/kernels/rows/softmax.h"
#include "cpu/kernels/rows/softmax_mask.h"
#include "cpu/kernels/rows/weight_only.h"
#include "cpu/kernels/rows/widen.h"
#include "cpu/kernels/rows/windows.h"
#include "cpu/kernels/tables/attention.h"
#include "cpu/kernels/tables/kernels.h"
#include "cpu/kernels/tables/lowbit.h"
#include "cpu/kernels/tables/rows.h"
#include "cpu/kernels/tables/sums.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

constexpr RowKernels kRowKernels = {
    .widen = widen_row,
    .range = range_of_row,
    .rotate = rotate_row,
    .rotate_back = rotate_row_back,
    .quantize = quantize_row,
    .quantize_groups = quantize_groups_of_row,
    .quantize_clamped = quantize_clamped_row,
    .random = random_groups,
    .quantize_stochastic = quantize_stochastic_row,
    .range_of_columns = range_of_columns,
    .quantize_columns = quantize_columns,
    .lstm = lstm_row,
    .gru = gru_row,
    .windows = &kWindowKernels,
    .depthwise = &kDepthwiseKernels,
};

constexpr SumKernels kSumKernels = {
    .epilogue = epilogue,
    .add_groups = add_groups,
    .weight_only = &kWeightOnlyKernels,
    .finish_floats = finish_floats,
};

constexpr AttentionKernels kAttentionKernels = {
    .codes_of_panel = codes_of_panel,
    .mask_of_floats = mask_of_floats,
    .mask_of_bools = mask_of_bools,
    .interleave_keys = interleave_keys,
    .interleave_values = interleave_values,
    .score = score_panels,
    .greatest = greatest_of_rows,
    .softmax = softmax_row,
    .probabilities = probabilities_of_row,
    .mix = mix_rows,
    .finish_rows = finish_rows,
    .score_gradient = score_gradient_of_row,
    .score_keys = score_keys,
    .exponentials = exponentials,
    .mix_values = mix_values,
    .cache = {.key_panels = key_panels_of_quad,
              .value_panels = value_panels_of_quad,
              .few = kCacheFew,
              .scales = scales_of_block,
              .query = codes_of_query,
              .score = cache_scores,
              .merge = merge_part,
              .nibbles = nibbles_of_row,
              .keys = keys_of_block,
              .values = values_of_block},
};

}  // namespace
}  // namespace qfx::cpu
