// Loops over all elements of operands of one shape, axes joined where they lie in order.
#pragma once

#include <algorithm>

#include "cpu/core/parallel.h"
#include "cpu/program/operand.h"

namespace qfx::cpu {

// What so many elements take, in parallel.h's unit.
inline int64_t work_of_elements(int64_t count) {
  constexpr int64_t kMany = int64_t{1} << 40;
  return 16 * std::min(count, kMany);
}

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

  double elements() const {
    double count = 1;
    for (int64_t d = 0; d < axes_; ++d) count *= static_cast<double>(sizes_[d]);
    return count;
  }

  // inner(n, strides, pointers) for runs of n elements, strides in elements; of many elements some
  // on each thread.
  template <typename F>
  void each(char* const* slots, const F& inner) const {
    const int64_t n = sizes_[axes_ - 1];
    int64_t runs = 1;
    for (int64_t d = 0; d + 1 < axes_; ++d) runs *= sizes_[d];
    if (n == 0) return;
    const Strides& strides = strides_[axes_ - 1];
    if (runs == 1) {
      parallel(n, work_of_elements(n), [&](int64_t begin, int64_t end) {
        Pointers at = pointers(slots);
        move(at, strides, begin);
        inner(end - begin, strides, at);
      });
    } else {
      parallel(runs, work_of_elements(runs * n), [&](int64_t begin, int64_t end) {
        Pointers at = pointers(slots);
        std::array<int64_t, kMostAxes> place = place_of(begin, at);
        for (int64_t run = begin; run < end; ++run) {
          inner(n, strides, at);
          advance(place, at);
        }
      });
    }
  }

 private:
  using Strides = std::array<int64_t, kOperands>;
  using Pointers = std::array<char*, kOperands>;

  Pointers pointers(char* const* slots) const {
    Pointers at;
    for (int i = 0; i < kOperands; ++i) at[i] = slots[slots_[i]] + offsets_[i];
    return at;
  }

  void move(Pointers& at, const Strides& strides, int64_t steps) const {
    for (int i = 0; i < kOperands; ++i) at[i] += steps * strides[i] * bytes_[i];
  }

  // Where a run begins.
  std::array<int64_t, kMostAxes> place_of(int64_t run, Pointers& at) const {
    std::array<int64_t, kMostAxes> place = {};
    for (int64_t d = axes_ - 2; d >= 0; --d) {
      place[d] = run % sizes_[d];
      run /= sizes_[d];
      move(at, strides_[d], place[d]);
    }
    return place;
  }

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
  void advance(std::array<int64_t, kMostAxes>& place, Pointers& at) const {
    for (int64_t d = axes_ - 2; d >= 0; --d) {
      const int64_t steps = ++place[d] < sizes_[d] ? 1 : 1 - sizes_[d];
      move(at, strides_[d], steps);
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
