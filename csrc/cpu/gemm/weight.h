// A packed weight of any kind, which its header says.
#pragma once

#include <string>

#include "cpu/gemm/integrity.h"
#include "cpu/gemm/lowbit.h"

namespace qfx::cpu {

struct Weight {
  int64_t bits;
  PackedWeight whole;  // of 8 bits
  LowbitWeight few;    // of fewer
  bool cut;            // whether K is cut into groups

  bool is_lowbit() const { return bits != 8; }
  const PackedWeight& shape() const { return is_lowbit() ? few.shape : whole; }
  // Whether a row has int8 codes with one scale and no zero point: its products are one exact sum.
  bool one_scale() const { return !is_lowbit() && !grouped(); }
  bool grouped() const { return cut || whole.zero != nullptr; }
  // Whether codes have zero points or minimums.
  bool is_shifted() const {
    return is_lowbit() ? few.kind.shift != Shift::kNone : whole.zero != nullptr;
  }
};

inline Contents contents_of(const Weight& w) { return {w.shape().contents, sizeof(PackedHeader)}; }

// Reads a buffer of `size` bytes. Returns what is wrong with its header, or an empty string.
std::string open_weight(const int8_t* data, int64_t size, Weight* weight);

}  // namespace qfx::cpu
