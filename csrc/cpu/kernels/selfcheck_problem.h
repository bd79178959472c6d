// The products that the self-check computes with every kernel, and what they are.
#pragma once

#include "cpu/kernels/tables/tiles.h"

namespace qfx::cpu {

inline constexpr int kDepth = 77;                    // of the products: whole steps and a tail
inline constexpr int kPaddedDepth = 2 * kKMultiple;  // room for every k_multiple
inline constexpr int kLines = 4;                     // kinds of rows

// The least and greatest codes a product of this kind may hold.
struct Limits {
  int a_low, a_high, w_low, w_high;
};

inline Limits limits_of(Operands operands) {
  const bool narrow_codes = operands == Operands::kNarrowCodes || operands == Operands::kNarrow;
  const bool narrow_weight = operands == Operands::kNarrowWeight || operands == Operands::kNarrow;
  return {narrow_codes ? -64 : -128, narrow_codes ? 63 : 127, narrow_weight ? -64 : -128,
          narrow_weight ? 64 : 127};
}

// Line i of codes in [low, high]: all lowest, all highest, in turns, or mixed.
inline int8_t code_at(int i, int k, int low, int high) {
  switch (i % kLines) {
    case 0:
      return static_cast<int8_t>(low);
    case 1:
      return static_cast<int8_t>(high);
    case 2:
      return static_cast<int8_t>(k % 2 ? low : high);
    default:
      return static_cast<int8_t>(low + (i * 31 + k * 17) % (high - low + 1));
  }
}

inline constexpr int kPanels = 2;                          // side by side
inline constexpr int kPanelBytes = kPaddedDepth * kPanel;  // from one to the next

// Operands, and the exact products of their codes.
struct Problem {
  int8_t q[kMaxTileRows][kDepth];
  alignas(64) int8_t b[kPanels * kPanelBytes] = {};  // panel blocks, zero padded
  int32_t colsum[kPanels * kPanel] = {};
  int32_t expected[kMaxTileRows][kPanels * kPanel] = {};

  explicit Problem(const Limits& limits) {
    for (int k = 0; k < kDepth; ++k) {
      int8_t w[kPanels * kPanel];
      for (int n = 0; n < kPanels * kPanel; ++n) {
        w[n] = code_at(n / 4 + n, k, limits.w_low, limits.w_high);
        const int group = k / kGroup * kPanel + n % kPanel;
        b[n / kPanel * kPanelBytes + group * kGroup + k % kGroup] = w[n];
        colsum[n] += w[n];
      }
      for (int m = 0; m < kMaxTileRows; ++m) {
        q[m][k] = code_at(m, k, limits.a_low, limits.a_high);
        for (int n = 0; n < kPanels * kPanel; ++n) expected[m][n] += q[m][k] * w[n];
      }
    }
  }
};

// Rows of a problem in a format.
struct Arranged {
  static inline constexpr int kStride = kPaddedDepth * kMaxBytesPerCode + 64;
  alignas(64) uint8_t a[kMaxTileRows * kStride];
  int32_t add[kMaxTileRows];
  int depth;

  Arranged(const Format& format, int rows, int begin, const Problem& problem)
      : depth((kDepth + format.k_multiple - 1) / format.k_multiple * format.k_multiple) {
    for (int m = 0; m < rows; ++m) {
      add[m] = format.arrange(problem.q[begin + m], kDepth, depth, a + m * kStride);
    }
  }
};

}  // namespace qfx::cpu
