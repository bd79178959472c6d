#include "cpu/kernels/selfcheck_lowbit.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "cpu/kernels/selfcheck_problem.h"
#include "cpu/kernels/tables/kernels.h"
#include "cpu/kernels/tables/lowbit.h"

namespace qfx::cpu {
namespace {

constexpr int kOf = 64, kGroups = 2, kPart = 32;  // k of a group, groups, and k of the last
constexpr int kScales = kPanel * 2, kNibbles = kOf / 2 * kPanel, kFifth = kOf / 8 * kPanel;
constexpr int kLongestBlock = kScales + kNibbles + kFifth;
constexpr int kMostRows = 8;

// A panel with the extremes of the codes, what it is unpacked to, and its products with rows.
// Scales are bfloat16 with zero points, and float16 without.
struct LowbitProblem {
  int bits, block;
  bool zeros;
  alignas(64) uint8_t panel[kGroups * kLongestBlock] = {};
  uint8_t zero[kGroups][kPanel];
  int8_t codes[kGroups][kOf * kPanel];
  int32_t colsum[kGroups][kPanel] = {};
  int8_t q[kMostRows][kOf + kPart];
  int32_t row_sum[kGroups][kMostRows] = {};
  float row_scale[kGroups][kMostRows], expected[kLines][kPanel] = {};

  LowbitProblem(int bits, bool zeros)
      : bits(bits), block(bits == 4 ? kScales + kNibbles : kLongestBlock), zeros(zeros) {
    for (int m = 0; m < kMostRows; ++m) {
      for (int k = 0; k < kOf + kPart; ++k) {
        q[m][k] = code_at(m % kLines, k, -128, 127);
        row_sum[k / kOf][m] += q[m][k];
      }
    }
    for (int g = 0; g < kGroups; ++g) {
      for (int m = 0; m < kMostRows; ++m) row_scale[g][m] = 1.f / (1 + m % kLines + 7 * g);
      for (int n = 0; n < kPanel; ++n) fill(g, n);
    }
  }

  static int length(int g) { return g + 1 < kGroups ? kOf : kPart; }

  LowbitTile tile(int rows, int begin, float* sums) const {
    return {rows,
            q[begin],
            sizeof(q[0]),
            panel,
            block,
            kGroups,
            kOf,
            kPart,
            zeros ? zero[0] : nullptr,
            1,
            0,
            zeros ? Dtype::kBFloat16 : Dtype::kFloat16,
            0,
            row_sum[0] + begin,
            row_scale[0] + begin,
            kMostRows,
            sums};
  }

 private:
  // Column n of group g.
  void fill(int g, int n) {
    uint8_t* at = panel + g * block;
    const uint16_t scale = static_cast<uint16_t>(0x3c00 + 5 * n + g);  // 1 and more as float16
    at[2 * n] = scale & 255;
    at[2 * n + 1] = scale >> 8;
    zero[g][n] = static_cast<uint8_t>((n * 5 + g) % (1 << bits));
    const int less = zeros ? zero[g][n] : 1 << (bits - 1);
    int code[kOf];
    for (int k = 0; k < kOf; ++k) {
      const int u = code_at(n / 4 + n, k + g, 0, (1 << bits) - 1);
      put(at + kScales, n, k, u);
      code[k] = u - less;
      codes[g][(k / kGroup * kPanel + n) * kGroup + k % kGroup] = static_cast<int8_t>(code[k]);
    }
    for (int k = 0; k < length(g); ++k) colsum[g][n] += code[k];
    const float of = zeros ? std::bit_cast<float>(uint32_t{scale} << 16)
                           : 1 + static_cast<float>(scale - 0x3c00) / 1024;
    for (int m = 0; m < kLines; ++m) {
      int exact = 0;
      for (int k = 0; k < length(g); ++k) exact += q[m][g * kOf + k] * code[k];
      expected[m][n] = std::fma(static_cast<float>(exact), row_scale[g][m] * of, expected[m][n]);
    }
  }

  void put(uint8_t* nibbles, int n, int k, int u) const {
    nibbles[k / 8 * 4 * kPanel + 4 * n + k % 4] |= (u & 15) << (k % 8 < 4 ? 0 : 4);
    if (bits == 4) return;
    const int bit = ((k / 8 * 2 + k % 8 / 4) * 2 + n / 16) * 64 + n % 16 * 4 + k % 4;
    nibbles[kNibbles + bit / 8] |= (u >> 4) << (bit % 8);
  }
};

bool is_right(LowbitTileFn tile, int rows, const LowbitProblem& problem) {
  for (int begin = 0; begin < kLines; begin += rows) {  // low tiles see every kind of row too
    alignas(64) float sums[kMostRows][kPanel] = {};
    tile(problem.tile(rows, begin, sums[0]));
    for (int m = 0; m < rows; ++m) {
      const float* expected = problem.expected[(begin + m) % kLines];
      if (!std::equal(expected, expected + kPanel, sums[m])) return false;
    }
  }
  return true;
}

bool unpacks(UnpackGroupFn unpack, const LowbitProblem& problem) {
  for (int g = 0; g < kGroups; ++g) {
    alignas(64) int8_t codes[kOf * kPanel];
    alignas(64) int32_t colsum[kPanel];
    const uint8_t* zero = problem.zeros ? problem.zero[g] : nullptr;
    unpack(problem.panel + g * problem.block, problem.length(g), kOf, zero, codes, colsum);
    const bool same = std::equal(codes, codes + problem.length(g) * kPanel, problem.codes[g]) &&
                      std::equal(colsum, colsum + kPanel, problem.colsum[g]);
    if (!same) return false;
  }
  return true;
}

bool multiplies(const LowbitKernels& kernels, const LowbitProblem& problem) {
  if (kernels.rows == nullptr) return true;
  for (const LowbitTileFn* tiles : kernels.few[problem.bits - kFewestBits]) {
    for (int rows = 1; rows <= kernels.rows->few.rows; ++rows) {
      if (!is_right(tiles[rows - 1], rows, problem)) return false;
    }
  }
  return true;
}

}  // namespace

std::string fault_of_lowbit(const Kernels& kernels) {
  for (int bits = kFewestBits; bits < kFewestBits + kBitWidths; ++bits) {
    for (bool zeros : {false, true}) {
      const LowbitProblem problem(bits, zeros);
      const bool right = unpacks(kernels.lowbit->unpack[bits - kFewestBits], problem);
      if (right && multiplies(*kernels.lowbit, problem)) continue;
      return "kernel " + std::string(right ? "lowbit" : "unpack") + std::to_string(bits) + "__" +
             kernels.isa + " computes a wrong output on this processor (" +
             (zeros ? "with" : "without") + " zero points)";
    }
  }
  return "";
}

}  // namespace qfx::cpu
