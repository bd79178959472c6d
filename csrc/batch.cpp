#include "batch.h"

#include <algorithm>

namespace qfx {

BatchSizes batch_sizes_of(const char* op, const char* a_name, const Tensor& a, const char* b_name,
                          const Tensor& b) {
  const auto last = a.sizes().end() - 2;
  STD_TORCH_CHECK(
      a.dim() >= 2 && a.dim() == b.dim() && std::equal(a.sizes().begin(), last, b.sizes().begin()),
      op, ": ", a_name, " has shape ", shape_of(a), " and ", b_name, " has shape ", shape_of(b),
      ", expected [*B, M, K] and [*B, N, K] with the same batch axes");
  const int64_t axis = a.dim() - 1, k = a.size(axis);
  STD_TORCH_CHECK(k == b.size(axis), op, ": ", a_name, " has K=", k, " (shape ", shape_of(a),
                  ") but ", b_name, " has K=", b.size(axis), " (shape ", shape_of(b), ")");
  STD_TORCH_CHECK(k <= kMaxK, op, ": K=", k, " is above ", kMaxK,
                  ", where the int32 accumulator of a dot product could overflow");
  int64_t batch = 1;
  for (auto size = a.sizes().begin(); size != last; ++size) batch *= *size;
  return {batch, a.size(axis - 1), b.size(axis - 1), k};
}

}  // namespace qfx
