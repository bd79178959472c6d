// How rows of attention are shared out among threads: each gets consecutive rows, counted through
// all heads, with as many scores as any other.
#pragma once

#include <cstdint>
#include <vector>

namespace qfx::cpu {

// What threads have to do: `heads` times `rows` rows, of which row m sees all `keys`, or the first
// m + 1 if `causal`.
struct RowWork {
  int64_t heads, rows, keys;
  bool causal;

  int64_t total() const { return heads * until(rows); }
  int64_t before(int64_t row) const { return row / rows * until(rows) + until(row % rows); }

 private:
  int64_t until(int64_t m) const;  // of the first m rows of a head
};

// threads + 1 rows, counted through all heads: share i begins with row [i] and ends before [i + 1].
// The work of a share differs from the mean by less than that of a row.
std::vector<int64_t> shares(const RowWork& work, int64_t threads);

}  // namespace qfx::cpu
