// What products read of one panel of 4- or 5-bit weights: groups unpacked to bytes, and minimums.
#pragma once

#include <algorithm>

#include "cpu/gemm/group_panel.h"
#include "cpu/gemm/lowbit.h"
#include "cpu/kernels/tables/rows.h"

namespace qfx::cpu {

inline constexpr int64_t kUnpackMultiple = 2 * kGroup;  // of k

inline int width_of(const LowbitWeight& w) { return static_cast<int>(w.kind.bits - kFewestBits); }

// Codes less zero points in bytes, a few groups at a time.
class UnpackedPanel final : public PanelReader {
 public:
  UnpackedPanel(const Kernels& kernels, const LowbitWeight& w, int64_t p, PanelMemory& memory)
      : kernels_(kernels), w_(w), p_(p), memory_(memory) {}

  PanelGroups read(int64_t begin, int64_t end) override {
    const UnpackGroupFn unpack = kernels_.lowbit->unpack[width_of(w_)];
    const int64_t group = w_.kind.group, first = begin / group;
    const int64_t groups = (end - begin + group - 1) / group;
    int8_t* codes = memory_.codes.get<int8_t>(groups * group * kPanel);
    int32_t* colsum = memory_.colsum.get<int32_t>(groups * kPanel);
    float* scale = memory_.scale.get<float>(groups * kPanel);
    for (int64_t i = 0; i < groups; ++i) {
      const int64_t g = first + i, depth = std::min(group, end - begin - i * group);
      const uint8_t* block = w_.block(p_, g);
      fetch_next(block + w_.kind.block());
      unpack(block, round_up(depth, kUnpackMultiple), group, w_.zero(p_, g),
             codes + i * group * kPanel, colsum + i * kPanel);
      kernels_.row->widen(block, w_.kind.scales, kPanel, scale + i * kPanel);
    }
    return {codes, colsum, {scale, kPanel}, {nullptr, 0}};
  }

  bool in_order() const override { return false; }

 private:
  void fetch_next(const uint8_t* block) const {
    for (int64_t i = 0; i < w_.kind.block(); i += 64) __builtin_prefetch(block + i);
  }

  const Kernels& kernels_;
  const LowbitWeight& w_;
  const int64_t p_;
  PanelMemory& memory_;
};

// The minimums of groups, as the products before them: fma(sum of x, factor * minimum, sums).
struct Minimums {
  const Kernels& kernels;
  const LowbitWeight& w;
  const int64_t p;

  // Of group g, [32].
  void load(int64_t g, float* minimum) const {
    const uint8_t* from = w.shifts(p) + g * kPanel * static_cast<int64_t>(sizeof(uint16_t));
    kernels.row->widen(from, w.kind.scales, kPanel, minimum);
  }

  void add(float sum, float factor, const float* minimum, float* sums) const {
    float same[kPanel];
    std::fill_n(same, kPanel, sum);
    kernels.lowbit->add_scaled(same, factor, minimum, sums);
  }
};

}  // namespace qfx::cpu
