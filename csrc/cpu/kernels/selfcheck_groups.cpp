#include "cpu/kernels/selfcheck_groups.h"

#include <algorithm>
#include <cmath>

#include "cpu/kernels/tables/kernels.h"

namespace qfx::cpu {
namespace {

constexpr int kMostGroups = 3;  // of kDepth codes: whole ones and a part

// The rows of a problem in groups, what their sums are scaled with, and what they become.
struct Grouped {
  int group, groups;
  alignas(64) uint8_t a[kMaxTileRows][kPaddedDepth * kMaxBytesPerCode + 64];
  int32_t add[kMostGroups][kMaxTileRows], pair[kMostGroups][kMaxTileRows];
  int32_t colsum[kMostGroups][kPanel] = {}, zero[kMostGroups][kPanel];
  float row_scale[kMostGroups][kMaxTileRows], scale[kMostGroups][kPanel];
  float expected[kMaxTileRows][kPanel] = {};

  Grouped(const Format& format, const Problem& problem, bool zeros)
      : group(std::max(format.k_multiple, 32)), groups((kDepth + group - 1) / group) {
    for (int g = 0; g < groups; ++g) {
      const int begin = g * group, length = std::min(group, kDepth - begin);
      for (int n = 0; n < kPanel; ++n) {
        for (int k = begin; k < begin + length; ++k) colsum[g][n] += weight(problem, n, k);
        zero[g][n] = zeros ? (n * 37 + g) % 256 - 128 : 0;
        scale[g][n] = 1.f / static_cast<float>(1000 + n + 7 * g);
      }
      for (int m = 0; m < kMaxTileRows; ++m) {
        const int z = zeros ? (m * 53 + g) % 256 - 128 : 0;
        row_scale[g][m] = 1.f / static_cast<float>(1 + m + 11 * g);
        add_row(format, problem, m, g, z, length);
      }
    }
  }

  GroupTile tile(const Format& format, const Problem& problem, int rows, int begin, int g,
                 bool zeros, float* sums) const {
    const int whole = g + 1 < groups ? groups - 1 : 1;  // the last one may be shorter
    const int depth = g + 1 < groups ? group : padded(format, kDepth - g * group);
    return {
        rows,
        a[begin] + g * group * format.bytes_per_code,
        sizeof(a[0]),
        problem.b + g * group * kPanel,
        whole,
        depth,
        problem.b,
        format.mul_offset,
        {add[g] + begin, nullptr, nullptr, zeros ? pair[g] + begin : nullptr, row_scale[g] + begin,
         kMaxTileRows, colsum[g], scale[g], kPanel, zeros ? zero[g] : nullptr, kPanel, sums}};
  }

 private:
  static int padded(const Format& format, int k) {
    return (k + format.k_multiple - 1) / format.k_multiple * format.k_multiple;
  }

  static int weight(const Problem& problem, int n, int k) {
    return problem.b[(k / kGroup * kPanel + n) * kGroup + k % kGroup];
  }

  void add_row(const Format& format, const Problem& problem, int m, int g, int z, int length) {
    const int begin = g * group;
    int sum = -z * length;
    for (int k = begin; k < begin + length; ++k) sum += problem.q[m][k];
    add[g][m] = format.arrange(problem.q[m] + begin, length, padded(format, length),
                               a[m] + begin * format.bytes_per_code);
    const uint32_t mul = static_cast<uint32_t>(z + format.mul_offset);
    pair[g][m] = static_cast<int32_t>((mul & 0xffff) | static_cast<uint32_t>(sum) << 16);
    for (int n = 0; n < kPanel; ++n) {
      int exact = 0;
      for (int k = begin; k < begin + length; ++k) {
        exact += (problem.q[m][k] - z) * (weight(problem, n, k) - zero[g][n]);
      }
      expected[m][n] =
          std::fma(static_cast<float>(exact), row_scale[g][m] * scale[g][n], expected[m][n]);
    }
  }
};

bool is_right(const Format& format, GroupTileFn tile, int rows, const Problem& problem,
              const Grouped& of, bool zeros) {
  for (int begin = 0; begin < kLines; begin += rows) {  // low tiles see every kind of row too
    alignas(64) float sums[kMaxTileRows][kPanel] = {};
    if (of.groups > 1) tile(of.tile(format, problem, rows, begin, 0, zeros, sums[0]));
    tile(of.tile(format, problem, rows, begin, of.groups - 1, zeros, sums[0]));
    const float* expected = of.expected[begin];
    if (!std::equal(expected, expected + rows * kPanel, sums[0])) return false;
  }
  return true;
}

}  // namespace

std::string fault_of_groups(const Kernels& kernels, const Format& format, const Problem& problem) {
  if (format.groups == nullptr) return "";
  for (bool zeros : {false, true}) {
    const Grouped of(format, problem, zeros);
    const auto wrong = [&](const GroupTileFn* tiles, int most) {
      int rows = 1;
      while (rows <= most && is_right(format, tiles[rows - 1], rows, problem, of, zeros)) ++rows;
      return rows <= most;
    };
    const GroupTiles& tiles = *format.groups;
    bool fault = wrong(tiles.tiles[zeros], format.tile_rows) ||
                 wrong(tiles.prefetching[zeros], format.tile_rows);
    for (const GroupTileFn* few : tiles.few[zeros]) fault = fault || wrong(few, format.few.rows);
    if (!fault) continue;
    return std::string("kernel ") + format.name + "_groups__" + kernels.isa +
           " computes a wrong output on this processor (" + (zeros ? "with" : "without") +
           " zero points)";
  }
  return "";
}

}  // namespace qfx::cpu
