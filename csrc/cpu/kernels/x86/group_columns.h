// The columns of a tile's groups, one group after the other.
#pragma once

#include "cpu/kernels/tables/groups.h"

namespace qfx::cpu {
namespace {

inline constexpr int32_t kNoZeros[kPanel] = {};

struct GroupColumns {
  const int32_t *colsum, *zero;
  const float* scale;
  int64_t zero_step, scale_step;

  explicit GroupColumns(const GroupTerms& t)
      : colsum(t.colsum),
        zero(t.zero == nullptr ? kNoZeros : t.zero),
        scale(t.scale),
        zero_step(t.zero == nullptr ? 0 : t.zero_step),
        scale_step(t.scale_step) {}

  void next() {
    colsum += kPanel;
    zero += zero_step;
    scale += scale_step;
  }
};

}  // namespace
}  // namespace qfx::cpu
