#include "cpu/gemm/grid.h"

#include "cpu/core/parallel.h"

namespace qfx::cpu {
namespace {

// The longest share may be this much longer than the mean before blocks are cut further.
constexpr int64_t kSlack = 16;  // a sixteenth

int64_t ceil_div(int64_t x, int64_t by) { return (x + by - 1) / by; }

}  // namespace

int64_t even_part(int64_t count, int64_t most, int64_t multiple) {
  const int64_t parts = std::max<int64_t>(ceil_div(count, most), 1);
  return std::max(ceil_div(ceil_div(count, parts), multiple) * multiple, multiple);
}

int64_t tile_height(int64_t rows, int64_t tallest) {
  return ceil_div(rows, ceil_div(rows, tallest));
}

Grid::Grid(const Extent& extent, int64_t height, int64_t shares)
    : rows_(extent.rows),
      panels_(extent.panels),
      height_(height),
      shares_(shares),
      blocks_(rows_ / height),
      units_(extent.products * blocks_ * panels_),
      rests_(rows_ % height == 0 ? 0 : extent.products * panels_) {
  // Streaming a panel once more costs about as much as half a tile.
  const int64_t passing = ceil_div(extent.tallest, 2);
  of_unit_ = height + passing;
  of_rest_ = rows_ % height + passing;
  int64_t low = std::max(ceil_div(total(), shares), units_ > 0 ? of_unit_ : of_rest_);
  int64_t high = shares == 1 ? low : low + of_unit_;  // by then every share but one has the mean
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    hold(middle);
    const bool enough = cut(shares) == units_ + rests_;
    (enough ? high : low) = enough ? middle : middle + 1;
  }
  hold(low);
}

void Grid::hold(int64_t cost) {
  longest_ = cost;
  of_units_ = std::max<int64_t>(cost / of_unit_, 1);
  of_rests_ = cost / of_rest_;
  meeting_ = std::max<int64_t>(units_ - 1, 0) / of_units_;
  between_ = (cost - (units_ - meeting_ * of_units_) * of_unit_) / of_rest_;
}

int64_t Grid::cut(int64_t i) const {
  if (i <= meeting_) return i * of_units_;
  return std::min(units_ + between_ + (i - meeting_ - 1) * of_rests_, units_ + rests_);
}

Grid grid_of(const Extent& extent, int64_t threads) {
  const int64_t most = even_part(extent.rows, extent.block_rows, extent.tallest);
  Grid best(extent, most, std::max<int64_t>(threads, 1));
  if (threads <= 1) return best;
  const int64_t tile = tile_height(extent.rows, extent.tallest);
  const int64_t fair = ceil_div(best.total(), threads);
  for (int64_t height = most; height > tile && best.longest() > fair + fair / kSlack;) {
    // The least height that gives a block more.
    const int64_t blocks = ceil_div(extent.rows, height) + 1;
    height = std::min(ceil_div(extent.rows, blocks * tile) * tile, (height - 1) / tile * tile);
    const Grid next(extent, height, threads);
    if (next.longest() < best.longest()) best = next;
  }
  return best;
}

int64_t whole_products(int64_t batch, int64_t work, int64_t threads) {
  constexpr int64_t kRounds = 8;  // beyond, the last one's idle threads do not matter
  const int64_t team = threads_for(batch * work, threads), rest = batch % team;
  const int64_t saved = work - rest * work / threads_for(rest * work, threads);
  return batch / team < kRounds && saved > kSerialWork ? batch - rest : batch;
}

}  // namespace qfx::cpu
