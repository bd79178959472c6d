#include "cpu/gemm/lowbit_product.h"

#include <algorithm>
#include <vector>

#include "cpu/gemm/group_panel.h"
#include "cpu/gemm/lowbit_panel.h"

namespace qfx::cpu {
namespace {

// What is chosen for one row of int8, but into the second cache where that is the first: to fetch a
// line costs these tiles more, as they fetch half as many in the same time. The second cache has
// room for more of them.
Tuning streaming(Tuning tuning) {
  if (tuning.hint == kNta) return tuning;
  tuning.hint = kT1;
  tuning.ahead = std::max(tuning.ahead, tuning.packed_ahead);
  return tuning;
}

class LowbitProduct final : public PanelWork {
 public:
  LowbitProduct(const Kernels& kernels, const GroupedRows& rows, const LowbitWeight& w,
                FloatOutput to, int64_t first, const Streaming* how)
      : kernels_(kernels),
        rows_(rows),
        w_(w),
        to_(to),
        first_(first),
        tuning_(
            with_streaming(streaming(tuning_of(format_for(kernels, Operands::kWide, 1))), how)) {}

  void run(const RowBlock& block, int64_t p) const override { run_all(block, p, p + 1); }

  void run_all(const RowBlock& block, int64_t p, int64_t end) const override {
    thread_local PanelMemory memory;
    if (rows_.rows.format != kernels_.lowbit->rows) {
      for (; p < end; ++p) store(block, p, unpacked(block, p, memory));
      return;
    }
    if (const int64_t whole = std::min(end, w_.shape.n / kPanel); is_output(block) && p < whole) {
      const int64_t at = (first_ + block.begin) * w_.shape.n + p * kPanel;
      multiply(block, p, whole - p, w_.zero(p, 0), reinterpret_cast<float*>(to_.data) + at);
      p = whole;
    }
    // Tiles meet the same panels in turn, while these are in cache. Each panel has the same zeros
    // where it has minimums.
    const int64_t height = tile_height(block.rows(), rows_.rows.format->tile_rows);
    const int64_t most = w_.kind.shift == Shift::kMinimums ? 1 : panels_at_once(height);
    for (int64_t next; p < end; p = next) {
      next = std::min(p + most, end);
      for (int64_t m = block.begin; m < block.end; m += height) {
        run_tile({m, std::min(m + height, block.end)}, p, next, memory);
      }
    }
  }

 private:
  // Whether nothing is to be done to the sums of its one row.
  bool is_output(const RowBlock& block) const {
    return block.rows() == 1 && w_.kind.shift != Shift::kMinimums && to_.bias == nullptr &&
           to_.residual == nullptr && to_.activation == Activation::kNone &&
           to_.dtype == Dtype::kFloat32;
  }

  void run_tile(const RowBlock& tile, int64_t p, int64_t end, PanelMemory& memory) const {
    const int64_t size = tile.rows() * kPanel;
    float* sums = memory.sums.get<float>((end - p) * size);
    multiply(tile, p, end - p, zeros(p, memory), sums);
    for (; p < end; ++p, sums += size) store(tile, p, sums);
  }

  void store(const RowBlock& block, int64_t p, float* sums) const {
    if (w_.kind.shift == Shift::kMinimums) add_minimums(block, p, sums);
    const bool past = past_caches(to_, w_.shape, rows_.rows.tuning);
    finish_sums(kernels_, {w_.shape, first_ + block.begin, block.rows(), p, past}, to_, sums);
  }

  void add_minimums(const RowBlock& block, int64_t p, float* sums) const {
    const Minimums minimums = {kernels_, w_, p};
    float minimum[kPanel];
    for (int64_t g = 0; g < w_.shape.groups(); ++g) {
      minimums.load(g, minimum);
      for (int64_t m = block.begin; m < block.end; ++m) {
        const int64_t at = g * rows_.rows.count + m;
        minimums.add(static_cast<float>(rows_.sum[at]), rows_.scale[at], minimum,
                     sums + (m - block.begin) * kPanel);
      }
    }
  }

  float* unpacked(const RowBlock& block, int64_t p, PanelMemory& memory) const {
    UnpackedPanel reader(kernels_, w_, p, memory);
    return GroupedPanel(kernels_, rows_, block, reader, memory).run();
  }

  // [G][32], or null.
  const uint8_t* zeros(int64_t p, PanelMemory& memory) const {
    if (w_.kind.shift != Shift::kMinimums) return w_.zero(p, 0);
    const int64_t count = w_.shape.groups() * kPanel;
    uint8_t* none = memory.zero.get<uint8_t>(count);
    std::fill_n(none, count, uint8_t{0});
    return none;
  }

  // Sums [panels][rows][32] of panels p, p + 1, ...
  void multiply(const RowBlock& block, int64_t p, int64_t panels, const uint8_t* zero,
                float* sums) const {
    const int64_t groups = w_.shape.groups(), m = block.begin;
    const LowbitTile tile = {static_cast<int>(block.rows()),
                             reinterpret_cast<const int8_t*>(rows_.rows.a) + m * rows_.rows.stride,
                             rows_.rows.stride,
                             w_.block(p, 0),
                             w_.kind.block(),
                             groups,
                             w_.kind.group,
                             groups == 0 ? 0 : w_.depth(groups - 1),
                             zero,
                             panels,
                             w_.kind.panel(groups),
                             w_.kind.scales,
                             ahead(),
                             rows_.sum + m,
                             rows_.scale + m,
                             rows_.rows.count,
                             sums};
    const auto* tiles = kernels_.lowbit->few[width_of(w_)][hint_for(tuning_, block.rows())];
    tiles[block.rows() - 1](tile);
  }

  // Whole groups: then their scales, nibbles and fifth bits, which are read side by side, are all
  // fetched as early as that.
  int64_t ahead() const { return round_up(tuning_.ahead, w_.kind.block()); }

  const Kernels& kernels_;
  const GroupedRows& rows_;
  const LowbitWeight& w_;
  const FloatOutput to_;
  const int64_t first_;
  const Tuning tuning_;  // that this machine chose for one row of int8: how weights are fetched
};

}  // namespace

const Format& lowbit_format_for(const Kernels& kernels, const LowbitWeight& w, bool zero_points,
                                int64_t rows) {
  const Format* few = kernels.lowbit->rows;
  const Format& one_row = format_for(kernels, Operands::kWide, 1);
  const bool in_registers = few != nullptr && !zero_points;
  if (in_registers && rows <= tuning_of(one_row).packed_rows) return *few;
  return format_for(kernels, operands_of(w.shape, false), rows);
}

bool needs_sums(const Kernels& kernels, const LowbitWeight& w, const Format& format) {
  return &format == kernels.lowbit->rows || w.kind.shift == Shift::kMinimums;
}

std::unique_ptr<PanelWork> lowbit_work(const Kernels& kernels, const GroupedRows& rows,
                                       const LowbitLinear& linear, int64_t first,
                                       const Streaming* how) {
  return std::make_unique<LowbitProduct>(kernels, rows, linear.w, linear.to, first, how);
}

void lowbit_linears(const Kernels& kernels, const GroupedRows& rows,
                    std::span<const LowbitLinear> all, int64_t first, const Streaming* how) {
  std::vector<LowbitProduct> works;
  std::vector<Columns> columns;
  works.reserve(all.size());
  for (const auto& [w, to] : all) {
    columns.push_back({w.shape, works.emplace_back(kernels, rows, w, to, first, how)});
  }
  for_each_panel(rows, columns);
}

}  // namespace qfx::cpu
