// The product with a weight in groups of K, of which it or the activations have scales, and perhaps
// zero points, of their own. (E3)
#pragma once

#include <memory>
#include <span>

#include "cpu/gemm/group_rows.h"

namespace qfx::cpu {

// A weight, and where the products by it go.
struct GroupedLinear {
  const PackedWeight& w;
  FloatOutput to;
};

// What is to be done with the panels of a weight: to.data[first + m][n] = act(sum_g ... + bias[n])
// of the rows, which must outlive it.
std::unique_ptr<PanelWork> grouped_work(const Kernels& kernels, const GroupedRows& rows,
                                        const GroupedLinear& linear, int64_t first);

// The same for each: weights of one K, and of
// groups of one length.
void grouped_linears(const Kernels& kernels, const GroupedRows& rows,
                     std::span<const GroupedLinear> all, int64_t first);

}  // namespace qfx::cpu
