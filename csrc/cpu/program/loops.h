// Loops over all elements of operands of one shape, axes joined where they lie in order.
#pragma once

#include <algorithm>

#include "cpu/program/operand.h"

namespace qfx::cpu {

template <int kOperands>
class Loops {
 public:
  explicit Loops(const std::array<Operand, kOperands>& operands) {
    for (int i = 0; i < kOperands; ++i) {
      expect(operands[i].axes == operands[0].axes, "operands have different shapes");
      slots_[i] = operands[i].slot, offsets_[i] = operands[i].offset;
      bytes_[i] = size_of(operands[i].element);
    }
    for (int64_t d = 0; d < operands[0].axes; ++d) add_axis(operands, d);
    if (axes_ == 0) axes_ = 1, sizes_[0] = 1;
  }

  // inner(n, strides, pointers) for runs of n elements, strides in elements.
  template <typename F>
  void each(char* const* slots, const F& inner) const {
    std::array<char*, kOperands> at;
    for (int i = 0; i < kOperands; ++i) at[i] = slots[slots_[i]] + offsets_[i];
    int64_t runs = 1;
    for (int64_t d = 0; d + 1 < axes_; ++d) runs *= sizes_[d];
    if (sizes_[axes_ - 1] == 0) return;
    std::array<int64_t, kMostAxes> place = {};
    for (int64_t run = 0; run < runs; ++run) {
      inner(sizes_[axes_ - 1], strides_[axes_ - 1], at);
      advance(place, at);
    }
  }

 private:
  using Strides = std::array<int64_t, kOperands>;

  void add_axis(const std::array<Operand, kOperands>& operands, int64_t d) {
    const int64_t size = operands[0].sizes[d];
    Strides strides;
    for (int i = 0; i < kOperands; ++i) {
      expect(operands[i].sizes[d] == size, "operands have different shapes");
      strides[i] = operands[i].strides[d];
    }
    if (size == 1) return;
    bool joins = axes_ > 0;
    for (int i = 0; joins && i < kOperands; ++i)
      joins = strides_[axes_ - 1][i] == strides[i] * size;
    if (!joins) sizes_[axes_++] = 1;
    sizes_[axes_ - 1] *= size;
    strides_[axes_ - 1] = strides;
  }

  // To the next run.
  void advance(std::array<int64_t, kMostAxes>& place, std::array<char*, kOperands>& at) const {
    for (int64_t d = axes_ - 2; d >= 0; --d) {
      const int64_t steps = ++place[d] < sizes_[d] ? 1 : 1 - sizes_[d];
      for (int i = 0; i < kOperands; ++i) at[i] += steps * strides_[d][i] * bytes_[i];
      if (steps == 1) return;
      place[d] = 0;
    }
  }

  int64_t axes_ = 0;
  std::array<int64_t, kMostAxes> sizes_ = {};
  std::array<Strides, kMostAxes> strides_ = {};
  std::array<int64_t, kOperands> slots_, offsets_, bytes_;
};

}  // namespace qfx::cpu
