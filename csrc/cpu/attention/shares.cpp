#include "cpu/attention/shares.h"

#include <algorithm>

namespace qfx::cpu {
namespace {

constexpr int64_t kOfRow = 64;  // of a row itself, which is quantized and stored, in scores

// The first row with at least this much work before it.
int64_t first_behind(const RowWork& work, int64_t amount) {
  int64_t low = 0, high = work.heads * work.rows;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (work.before(middle) >= amount) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

}  // namespace

int64_t RowWork::until(int64_t m) const {
  if (!causal) return m * (keys + kOfRow);
  const int64_t growing = std::min(m, keys);
  return growing * (growing + 1) / 2 + (m - growing) * keys + m * kOfRow;
}

std::vector<int64_t> shares(const RowWork& work, int64_t threads) {
  std::vector<int64_t> cuts(static_cast<size_t>(threads) + 1, 0);
  if (work.rows == 0) return cuts;
  const int64_t whole = work.total() / threads, rest = work.total() % threads;
  for (int64_t i = 1; i <= threads; ++i) {
    cuts[i] = first_behind(work, whole * i + rest * i / threads);
  }
  return cuts;
}

}  // namespace qfx::cpu
