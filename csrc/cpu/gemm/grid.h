// How products are shared out among threads: blocks of rows times panels, in equal shares. Numbers
// in, numbers out. Where K is cut too (k_parts.h), a part of it is a product here.
#pragma once

#include <algorithm>
#include <cstdint>

namespace qfx::cpu {

// A block of rows, whose codes stay in L2 while it meets panel after panel.
struct RowBlock {
  int64_t begin, end;

  int64_t rows() const { return end - begin; }
};

// Panels of one of the products that a block of its rows meets.
struct Task {
  int64_t product;
  RowBlock block;
  int64_t panel_begin, panel_end;
};

// `count` in equal parts of at most `most`: the size of one, a multiple of `multiple`, which may
// exceed `most` by less than one of those.
int64_t even_part(int64_t count, int64_t most, int64_t multiple);

// Rows of a tile: as tall as the kernels allow, and all of about the same height.
int64_t tile_height(int64_t rows, int64_t tallest);

// So many products of one size, and the tiles that compute them.
struct Extent {
  int64_t products, rows, panels;
  int64_t tallest;     // rows of the tallest tile
  int64_t block_rows;  // Tuning::block_rows
};

// Each product is cut into blocks of `height` rows and what is left of them, the rest. A unit is a
// block and a panel. Units lie in a line, those of whole blocks before those of rests, each by
// product, block and panel. Every share is the longest stretch of the line that costs no more than
// any share has to.
class Grid {
 public:
  Grid(const Extent& extent, int64_t height, int64_t shares);

  int64_t shares() const { return shares_; }

  // What all of it costs, and the most that a share does, in rows that meet a panel.
  int64_t total() const { return units_ * of_unit_ + rests_ * of_rest_; }
  int64_t longest() const { return longest_; }

  // f(task) for each block that share i has a part of, in the order of the line.
  template <typename F>
  void for_each_task(int64_t i, const F& f) const {
    const int64_t end = cut(i + 1);
    for (int64_t unit = cut(i), next; unit < end; unit = next) {
      const int64_t first = unit % panels_;
      next = std::min(end, unit - first + panels_);
      f(task_of(unit / panels_, first, first + next - unit));
    }
  }

 private:
  int64_t cut(int64_t i) const;  // the unit that share i begins with
  void hold(int64_t cost);       // in a share, at most

  Task task_of(int64_t line, int64_t panel_begin, int64_t panel_end) const {
    const int64_t wholes = units_ / panels_, block = line < wholes ? line % blocks_ : blocks_;
    const int64_t product = line < wholes ? line / blocks_ : line - wholes;
    const RowBlock rows = {block * height_, std::min(rows_, (block + 1) * height_)};
    return {product, rows, panel_begin, panel_end};
  }

  int64_t rows_, panels_, height_, shares_;
  int64_t blocks_;             // whole ones of a product
  int64_t units_, rests_;      // of all products
  int64_t of_unit_, of_rest_;  // what one costs
  int64_t longest_;
  int64_t of_units_, of_rests_;  // in a share of one kind
  int64_t meeting_, between_;    // the share with the last unit, and the rests in it
};

// In as many shares as threads. On one thread blocks are as high as the caches like them; on
// several they may be lower, by whole tiles, where shares are more equal then.
Grid grid_of(const Extent& extent, int64_t threads);

// How many of a batch of products of `work` steps each (core/parallel.h) are computed whole, one on
// each thread at a time. The rest, fewer than threads, is one grid for all of them, where that
// saves more than it takes to wake threads.
int64_t whole_products(int64_t batch, int64_t work, int64_t threads);

}  // namespace qfx::cpu
