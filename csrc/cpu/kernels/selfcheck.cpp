#include "cpu/kernels/selfcheck.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "cpu/kernels/selfcheck_floats.h"
#include "cpu/kernels/selfcheck_groups.h"
#include "cpu/kernels/selfcheck_lowbit.h"
#include "cpu/kernels/selfcheck_problem.h"
#include "cpu/kernels/selfcheck_strips.h"
#include "cpu/kernels/tables/rows.h"
#include "cpu/kernels/tables/sums.h"

namespace qfx::cpu {
namespace {

// The first of the sums [panels][rows][32] that is wrong, as (row, column), or (rows, 0) if none
// is, of so many columns.
std::array<int, 2> first_wrong(const Format& format, const Arranged& x, const int32_t* sums,
                               int columns, int rows, int begin, const Problem& problem) {
  for (int m = 0; m < rows; ++m) {
    for (int n = 0; n < columns; ++n) {
      // Unsigned, as wrong sums may be anything.
      const int32_t sum = sums[(n / kPanel * rows + m) * kPanel + n % kPanel];
      const uint32_t found =
          static_cast<uint32_t>(sum) + static_cast<uint32_t>(x.add[m]) -
          static_cast<uint32_t>(format.mul_offset) * static_cast<uint32_t>(problem.colsum[n]);
      if (found != static_cast<uint32_t>(problem.expected[begin + m][n])) return {m, n};
    }
  }
  return {rows, 0};
}

// A tile that computes so many columns.
struct CheckedTile {
  TileFn tile;
  int columns;
};

// One of them on rows begin, begin + 1, ...
std::array<int, 2> first_wrong(const Format& format, const CheckedTile& checked, int rows,
                               int begin, const Problem& problem) {
  const auto& [tile, columns] = checked;
  const Arranged x(format, rows, begin, problem);
  alignas(64) int32_t sums[kMaxTileRows * kPanel];
  const int first = format.k_multiple;  // the rest is accumulated
  tile(x.a, x.kStride, problem.b, first / kGroup, problem.b, sums, false);
  tile(x.a + first * format.bytes_per_code, x.kStride, problem.b + first * kPanel,
       (x.depth - first) / kGroup, problem.b, sums, true);
  return first_wrong(format, x, sums, columns, rows, begin, problem);
}

std::array<int, 2> first_wrong(const Format& format, TileFn tile, int rows, int begin,
                               const Problem& problem) {
  return first_wrong(format, CheckedTile{tile, kPanel}, rows, begin, problem);
}

std::array<int, 2> first_wrong(const Format& format, PairFn pair, int rows, int begin,
                               const Problem& problem) {
  const Arranged x(format, rows, begin, problem);
  alignas(64) int32_t sums[kPanels * kMaxTileRows * kPanel];
  pair(x.a, x.kStride, problem.b, kPanelBytes, x.depth / kGroup, 0, sums);
  return first_wrong(format, x, sums, kPanels * kPanel, rows, begin, problem);
}

template <typename Fn>
std::string fault_of_tile(const Kernels& kernels, const Format& format, Fn tile, int rows,
                          const Problem& problem) {
  for (int begin = 0; begin < kLines; begin += rows) {  // low tiles see every kind of row too
    const auto [m, n] = first_wrong(format, tile, rows, begin, problem);
    if (m == rows) continue;
    return "kernel " + kernel_name(kernels, format, rows) +
           " computes a wrong product on this processor (row " + std::to_string(m) + ", column " +
           std::to_string(n) + " of a product of depth " + std::to_string(kDepth) + ")";
  }
  return "";
}

template <typename Fn>
std::string fault_of_tiles(const Kernels& kernels, const Format& format, const ByHint<Fn>& tiles,
                           const Problem& problem) {
  for (const Fn* of_hint : tiles.tiles) {
    for (int rows = 1; rows <= tiles.rows; ++rows) {
      const std::string fault = fault_of_tile(kernels, format, of_hint[rows - 1], rows, problem);
      if (!fault.empty()) return fault;
    }
  }
  return "";
}

// The first element of `found` whose bits are not those of `expected`, or n.
int first_other(const float* found, const float* expected, int n) {
  const auto same = [](float a, float b) {
    return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
  };
  return static_cast<int>(std::mismatch(found, found + n, expected, same).first - found);
}

std::string fault_of_format(const Kernels& kernels, const Format& format, const Problem& problem) {
  for (int rows = 1; rows <= format.tile_rows; ++rows) {
    const std::pair<const TileFn*, int> all[] = {{format.tiles, kPanel},
                                                 {format.prefetching_tiles, kPanel},
                                                 {format.half_prefetching_tiles, kPanel},
                                                 {format.narrow_tiles, kPanel / 2}};
    for (const auto& [tiles, columns] : all) {
      if (tiles == nullptr) continue;
      const CheckedTile tile = {tiles[rows - 1], columns};
      const std::string fault = fault_of_tile(kernels, format, tile, rows, problem);
      if (!fault.empty()) return fault;
    }
  }
  std::string fault = fault_of_tiles(kernels, format, format.few, problem);
  if (fault.empty()) fault = fault_of_tiles(kernels, format, format.pairs, problem);
  if (fault.empty()) fault = fault_of_strips(kernels, format, problem);
  return fault.empty() ? fault_of_groups(kernels, format, problem) : fault;
}

// A row of n elements, of which the last are in smaller blocks if `rotation` does not divide n.
std::string fault_of_rotation(const Kernels& kernels, int n, int rotation) {
  constexpr int most = 2 * kLargestRotation;
  float x[most], factor[most], there[most], back[most], expected_there[most], expected_back[most];
  for (int k = 0; k < n; ++k) {
    x[k] = static_cast<float>(code_at(kLines - 1, k, -128, 127)) / 3.f;
    factor[k] = 1.f / static_cast<float>(1 + k % 5);
  }
  const RowKernels& ref = *kernels_ref().row;
  const Transform transform = {factor, rotation};
  Range range, expected;
  kernels.row->rotate(x, n, &transform, there, &range);
  ref.rotate(x, n, &transform, expected_there, &expected);
  kernels.row->rotate_back(x, n, &transform, back);
  ref.rotate_back(x, n, &transform, expected_back);
  const int at =
      std::min(first_other(there, expected_there, n), first_other(back, expected_back, n));
  const bool same_range = range.magnitude == expected.magnitude && range.low == expected.low &&
                          range.high == expected.high;
  if (at == n && same_range) return "";
  return std::string("kernel rotate__") + kernels.isa +
         " computes a wrong rotation on this processor (blocks of " + std::to_string(rotation) +
         ", " + (at < n ? "element " + std::to_string(at) : "the range") + " of a row of " +
         std::to_string(n) + ")";
}

// Against the reference, which is plain loops.
std::string fault_of_rotations(const Kernels& kernels) {
  constexpr int n = 2 * kLargestRotation;
  for (int rotation : {0, 2, 4, 8, 16, 32, 64, 128, kLargestRotation}) {
    std::string fault = fault_of_rotation(kernels, n, rotation);
    if (fault.empty()) fault = fault_of_rotation(kernels, n - 1, rotation);
    if (!fault.empty()) return fault;
  }
  return "";
}

}  // namespace

std::vector<const Format*> formats_of(const Kernels& kernels) {
  std::vector<const Format*> found;
  for (const Format* format : kernels.formats) {
    for (; format != nullptr; format = format->below) {
      if (std::find(found.begin(), found.end(), format) == found.end()) found.push_back(format);
    }
  }
  return found;
}

std::string kernel_name(const Kernels& kernels, const Format& format, int rows) {
  return std::string(format.name) + "_gemm_" + std::to_string(rows) + "x" + std::to_string(kPanel) +
         "__" + kernels.isa;
}

std::string fault_of(const Kernels& kernels) {
  std::vector<const Format*> checked;
  for (int kind = 0; kind < kOperandKinds; ++kind) {
    const Problem problem(limits_of(static_cast<Operands>(kind)));
    for (const Format* f = kernels.formats[kind]; f != nullptr; f = f->below) {
      if (std::find(checked.begin(), checked.end(), f) != checked.end()) continue;
      checked.push_back(f);
      const std::string fault = fault_of_format(kernels, *f, problem);
      if (f->release != nullptr) f->release();
      if (!fault.empty()) return fault;
    }
  }
  std::string fault = fault_of_lowbit(kernels);
  if (fault.empty()) fault = fault_of_weight_only(kernels);
  return fault.empty() ? fault_of_rotations(kernels) : fault;
}

}  // namespace qfx::cpu
