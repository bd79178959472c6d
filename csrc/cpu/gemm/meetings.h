// Several groups of rows, each of which meets a weight of its own.
#pragma once

#include <span>

#include "cpu/gemm/gemm.h"

namespace qfx::cpu {

// Rows, and the weight that they meet.
struct Meeting {
  const RowSource& from;
  Columns columns;
};

// Fills the rows of all, then runs the work of all, on one team of threads, each with an equal
// share of it.
void for_each_panel(std::span<const Meeting> all);

}  // namespace qfx::cpu
