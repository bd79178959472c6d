// Products with weights of 4 and 5 bits. (E4) (W3)
#pragma once

#include <memory>

#include "cpu/gemm/group_rows.h"
#include "cpu/gemm/lowbit.h"

namespace qfx::cpu {

// The format for rows of codes, some of which may have zero points: few rows of symmetric codes
// meet the weights as they lie, for others these are unpacked.
const Format& lowbit_format_for(const Kernels& kernels, const LowbitWeight& w, bool zero_points,
                                int64_t rows);

// Whether rows need the sums of their codes.
bool needs_sums(const Kernels& kernels, const LowbitWeight& w, const Format& format);

// A weight, and where the products by it go.
struct LowbitLinear {
  const LowbitWeight& w;
  FloatOutput to;
};

// What is to be done with the panels of a weight: to.data[first + m][n] = act(sum_g ... + bias[n])
// of rows in that format, which must outlive it.
std::unique_ptr<PanelWork> lowbit_work(const Kernels& kernels, const GroupedRows& rows,
                                       const LowbitLinear& linear, int64_t first,
                                       const Streaming* how = nullptr);

// The same for each: weights of one
// K, and of groups of one length and kind.
void lowbit_linears(const Kernels& kernels, const GroupedRows& rows,
                    std::span<const LowbitLinear> all, int64_t first,
                    const Streaming* how = nullptr);

// The same of float rows x [rows][stride], zero padded to whole groups, the first the output row 0.
struct FloatRowsInMemory {
  const float* data;
  int64_t rows, stride;
};
void lowbit_weight_linear(const Kernels& kernels, const FloatRowsInMemory& x, const LowbitWeight& w,
                          const FloatOutput& to);

}  // namespace qfx::cpu
