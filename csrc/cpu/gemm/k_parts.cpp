#include "cpu/gemm/k_parts.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "cpu/core/parallel.h"
#include "cpu/core/scratch.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kMostRows = 64;     // whose sums of all parts stay in the caches
constexpr int64_t kLeastDepth = 512;  // of a part: 16 KB of a panel
constexpr int64_t kMostParts = 8;     // of that depth none is empty, though each is whole steps

// Where a panel's codes of a part of K begin and end.
struct KPart {
  int64_t begin, end;
};

// The panels of all weights in one line, each with the sums of its parts.
class PartialSums {
 public:
  PartialSums(const RowSource& from, std::span<const Product> products, int64_t parts)
      : rows_(from.rows), products_(products), parts_(parts) {
    for (const Product& each : products) panels_ += each.w.panels();
    done_ = std::vector<Count>(static_cast<size_t>(panels_));
    thread_local Scratch memory;
    sums_ = memory.get<int32_t>(panels_ * parts * size());
  }

  int64_t panels() const { return panels_; }

  // One part of a panel in that line; who does the last one of a panel finishes it.
  void run(int64_t part, int64_t panel) const {
    int64_t p = panel;
    const Product* product = products_.data();
    for (; p >= product->w.panels(); ++product) p -= product->w.panels();
    int32_t* all = sums_ + panel * parts_ * size();
    multiply(product->w, p, part_of(product->w.k, part), all + part * size());
    if (done_[panel].of.fetch_add(1, std::memory_order_acq_rel) + 1 < parts_) return;
    for (int64_t i = 1; i < parts_; ++i) add(all + i * size(), all);
    finish(*product, p, all);
  }

 private:
  struct alignas(64) Count {
    mutable std::atomic<int64_t> of = 0;
  };

  int64_t size() const { return rows_.count * kPanel; }

  int64_t height() const { return tile_height(rows_.count, rows_.format->tile_rows); }

  KPart part_of(int64_t k, int64_t part) const {
    const int64_t depth = round_up(k, rows_.format->k_multiple);
    const int64_t step = round_up((depth + parts_ - 1) / parts_, kKMultiple);
    return {part * step, std::min((part + 1) * step, depth)};
  }

  void multiply(const PackedWeight& w, int64_t p, const KPart& part, int32_t* sums) const {
    const Format& format = *rows_.format;
    const Passage how = passage_of(rows_, w, rows_.count);
    const int64_t groups = (part.end - part.begin) / kGroup;
    const int8_t* b = w.panel(p) + part.begin * kPanel;
    for (int64_t m = 0; m < rows_.count; m += height()) {
      const int64_t here = std::min(height(), rows_.count - m);
      const TileFn* tiles = m == 0 ? how.fetching_tiles : format.tiles;
      const uint8_t* a = rows_.a + m * rows_.stride + part.begin * format.bytes_per_code;
      tiles[here - 1](a, rows_.stride, b, groups, b + rows_.tuning.ahead, sums + m * kPanel, false);
    }
  }

  void add(const int32_t* part, int32_t* sums) const {
    for (int64_t i = 0; i < size(); ++i) {
      sums[i] =
          static_cast<int32_t>(static_cast<uint32_t>(sums[i]) + static_cast<uint32_t>(part[i]));
    }
  }

  void finish(const Product& product, int64_t p, const int32_t* sums) const {
    Panel columns;
    product.sink.load_panel(p, &columns);
    for (int64_t m = 0; m < rows_.count; m += height()) {
      const int64_t here = std::min(height(), rows_.count - m);
      product.sink.tile(sums + m * kPanel, m, static_cast<int>(here), p, columns);
    }
  }

  const Rows& rows_;
  const std::span<const Product> products_;
  const int64_t parts_;
  int64_t panels_ = 0;
  std::vector<Count> done_;
  int32_t* sums_;
};

// A part of K is a product, with all rows in one block.
Grid grid_of_parts(Extent extent, int64_t parts, int64_t threads) {
  extent.products = parts;
  return Grid(extent, extent.rows, threads);
}

}  // namespace

int64_t k_parts_of(const Extent& extent, int64_t k, int64_t threads) {
  constexpr int64_t kEnough = 4;  // units for each thread, so that shares differ little
  const int64_t most = std::min(k / kLeastDepth, kMostParts);
  const int64_t tiles = (extent.rows + extent.tallest - 1) / extent.tallest;
  if (extent.rows > kMostRows || tiles * extent.panels >= kEnough * threads) return 1;
  // The longest share, in rows that meet a panel; parts must save a fifth of it, and more of them
  // more of that.
  double least = static_cast<double>(grid_of(extent, threads).longest());
  int64_t best = 1;
  for (int64_t parts = 2; parts <= most; ++parts) {
    const double all = static_cast<double>(grid_of_parts(extent, parts, threads).longest());
    const double longest = all / static_cast<double>(parts);
    if (longest < 0.8 * least) least = longest, best = parts;
  }
  return best;
}

void gemm_in_parts(const RowSource& from, std::span<const Product> products, int64_t parts,
                   int64_t threads) {
  const Rows& rows = from.rows;
  const PartialSums sums(from, products, parts);
  const Extent extent = {1, rows.count, sums.panels(), rows.format->tile_rows, rows.count};
  const Grid grid = grid_of_parts(extent, parts, threads);
  in_two_steps(
      threads, rows.count, 1, [&](int64_t begin, int64_t end) { from.fill(begin, end); },
      [&](int64_t share) {
        grid.for_each_task(share, [&](const Task& task) {
          for (int64_t p = task.panel_begin; p < task.panel_end; ++p) sums.run(task.product, p);
        });
        release(*rows.format);
      });
}

}  // namespace qfx::cpu
