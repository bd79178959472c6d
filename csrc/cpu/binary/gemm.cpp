#include "cpu/binary/gemm.h"

#include <algorithm>
#include <limits>

#include "cpu/core/parallel.h"
#include "cpu/core/scratch.h"
#include "cpu/kernels/dispatch.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kBlockRows = 240;  // a multiple of every tile height
constexpr int64_t kArrangedBytes = 16 << 20;
constexpr int64_t kStepsPerElement = 4;  // of taking signs, in parallel.h's unit
constexpr int64_t kBitsPerStep = 4;      // of the product

int64_t ceil_div(int64_t x, int64_t by) { return (x + by - 1) / by; }

// An odd number of cache lines, or the rows of a tile would share cache sets.
int64_t stride_for(const BinaryKernels& kernels, int64_t groups) {
  return (ceil_div(groups * kernels.bytes_per_group + kSlack, 64) | 1) * 64;
}

// A block of packed weights as tiles read it.
const uint8_t* readable(const BinaryKernels& kernels, const uint8_t* packed, int64_t groups) {
  if (kernels.spread == nullptr) return packed;
  thread_local Scratch scratch;
  uint8_t* b = scratch.get<uint8_t>(kernels.block * kPanel * kernels.spread_bytes + kSlack);
  kernels.spread(packed, groups, b);
  return b;
}

// Prefetches tile `i` of `tiles`' share of the next block; blocks lie one after another.
void prefetch_next(const uint8_t* packed, int64_t groups, int64_t i, int64_t tiles) {
  constexpr int64_t kLine = 64;
  const int64_t lines = groups * kPanel * kBitGroupBytes / kLine;
  const uint8_t* next = packed + groups * kPanel * kBitGroupBytes;
  for (int64_t line = i * lines / tiles; line < (i + 1) * lines / tiles; ++line) {
    __builtin_prefetch(next + line * kLine);
  }
}

// Rows begin..end of panel p, in tiles of about the same height.
void run_panel(const BinaryKernels& kernels, const BitRows& rows, const PackedBits& w,
               int64_t begin, int64_t end, int64_t p, const TileSink& sink) {
  thread_local Scratch scratch;
  int32_t* sums = scratch.get<int32_t>(kBlockRows * kPanel);
  Panel panel;
  sink.load_panel(p, &panel);
  const int64_t row_groups = ceil_div(end - begin, kernels.row_group);
  const int64_t tiles = ceil_div(row_groups, kernels.tile_groups);
  const int64_t height = ceil_div(row_groups, tiles);
  for (int64_t g = 0; g == 0 || g < w.groups(); g += kernels.block) {
    const int64_t groups = std::min(kernels.block, w.groups() - g);
    const uint8_t* packed = w.panel(p) + g * kPanel * kBitGroupBytes;
    const uint8_t* b = readable(kernels, packed, groups);
    for (int64_t r = 0; r < row_groups; r += height) {
      const int64_t m = begin + r * kernels.row_group, here = std::min(height, row_groups - r);
      const uint8_t* a = rows.a + m / kernels.row_group * rows.stride + g * kernels.bytes_per_group;
      if (tiles > 1) prefetch_next(packed, groups, r / height, tiles);
      int32_t* tile = sums + r * kernels.row_group * kPanel;
      kernels.tiles[here - 1](a, rows.stride, b, groups, tile, g > 0);
      const int64_t count = std::min(here * kernels.row_group, end - m);
      if (g + groups >= w.groups()) sink.tile(tile, m, static_cast<int>(count), p, panel);
    }
  }
}

}  // namespace

const BinaryKernels& binary_kernels_of([[maybe_unused]] Isa isa) {
#if defined(__x86_64__)
  const bool avx512 = isa == Isa::kAvx512Vnni || isa == Isa::kAmx;
  if (avx512 && __builtin_cpu_supports("avx512vpopcntdq")) return binary_kernels_avx512();
  if (isa != Isa::kRef) return binary_kernels_avx2();
#endif
  return binary_kernels_ref();
}

int64_t bit_rows_at_once(const BinaryKernels& kernels, const PackedBits& w) {
  const int64_t row_bytes = stride_for(kernels, w.groups()) / kernels.row_group;
  return std::max<int64_t>(kArrangedBytes / row_bytes / kBlockRows, 1) * kBlockRows;
}

BitRows signs_of(const BinaryKernels& kernels, const PackedBits& w, const FloatMatrix& x,
                 float* row_scale) {
  thread_local Scratch arranged;
  const Kernels& floats = kernels_of(current_isa());
  const int64_t stride = stride_for(kernels, w.groups()), bytes = w.groups() * kBitGroupBytes;
  const int64_t row_groups = ceil_div(x.rows, kernels.row_group);
  const BitRows rows = {arranged.get<uint8_t>(row_groups * stride), x.rows, stride};
  parallel(row_groups, x.rows * x.columns * kStepsPerElement, [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    uint8_t* bits = scratch.get<uint8_t>(kMaxRowGroup * bytes);
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t r = 0; r < kernels.row_group; ++r) {
        const int64_t m = i * kernels.row_group + r;
        if (m >= x.rows) {  // the absent partner of the last row
          std::fill(bits + r * bytes, bits + (r + 1) * bytes, 0);
          continue;
        }
        const float* row = row_as_floats(floats, x, m);
        const bool nan = kernels.signs(row, x.columns, bytes, bits + r * bytes);
        if (row_scale) row_scale[m] = nan ? std::numeric_limits<float>::quiet_NaN() : 1.f;
      }
      kernels.arrange(bits, w.groups(), rows.a + i * stride);
    }
  });
  return rows;
}

void binary_gemm(const BinaryKernels& kernels, const BitRows& rows, const PackedBits& w,
                 const TileSink& sink) {
  const int64_t panels = w.panels(), work = rows.count * w.n * w.groups() * kBitGroup;
  parallel(ceil_div(rows.count, kBlockRows) * panels, work / kBitsPerStep,
           [&](int64_t begin, int64_t end) {
             for (int64_t i = begin; i < end; ++i) {
               const int64_t m = i / panels * kBlockRows;
               run_panel(kernels, rows, w, m, std::min(m + kBlockRows, rows.count), i % panels,
                         sink);
             }
           });
}

}  // namespace qfx::cpu
