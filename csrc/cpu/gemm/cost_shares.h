// How products of different sizes are shared out among threads: blocks of rows times panels, in
// shares that cost the same. Numbers in, numbers out. Products of one size: grid.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/gemm/grid.h"

namespace qfx::cpu {

// Stretches of panels lie in a line, in the order in which they were added. A share is an equal
// part of what they cost, rounded up to whole panels.
class CostShares {
 public:
  // The panels that a block of the rows of a product meets, each of which costs so much.
  void add(int64_t product, const RowBlock& block, int64_t panels, int64_t cost) {
    stretches_.push_back({product, block, panels, cost, total_});
    total_ += panels * cost;
  }

  int64_t total() const { return total_; }

  // f(task) for each block that a share of so many has panels of.
  template <typename F>
  void for_each_task(int64_t share, int64_t shares, const F& f) const {
    const int64_t begin = bound(share, shares), end = bound(share + 1, shares);
    const auto ends_before = [](const Stretch& s, int64_t place) { return s.end() <= place; };
    auto s = std::lower_bound(stretches_.begin(), stretches_.end(), begin, ends_before);
    for (; s != stretches_.end() && s->before < end; ++s) {
      const int64_t first = s->panels_before(begin), last = s->panels_before(end);
      if (first < last) f(Task{s->product, s->block, first, last});
    }
  }

 private:
  struct Stretch {
    int64_t product;
    RowBlock block;
    int64_t panels, cost, before;

    int64_t end() const { return before + panels * cost; }
    // Its panels that begin before this place in the line.
    int64_t panels_before(int64_t place) const {
      return std::clamp<int64_t>((place - before + cost - 1) / cost, 0, panels);
    }
  };

  int64_t bound(int64_t share, int64_t shares) const {
    return total_ / shares * share + total_ % shares * share / shares;
  }

  std::vector<Stretch> stretches_;
  int64_t total_ = 0;
};

}  // namespace qfx::cpu
