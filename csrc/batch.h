// What the batched products of all devices share: the sizes of their operands, with checks.
#pragma once

#include "operands.h"

namespace qfx {

struct BatchSizes {
  int64_t batch, m, n, k;
};

// Of a [*B, M, K] and b [*B, N, K].
BatchSizes batch_sizes_of(const char* op, const char* a_name, const Tensor& a, const char* b_name,
                          const Tensor& b);

}  // namespace qfx
