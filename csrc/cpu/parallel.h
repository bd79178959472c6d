// Threads: torch's own pool, and none for work that would not repay waking it.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>

namespace qfx::cpu {

// Steps (multiply-accumulates, or 16 per element moved) that take about 5 microseconds.
inline constexpr int64_t kSerialWork = 1 << 19;

// Runs f(begin, end) over 0..count; `work` is the total number of steps.
template <typename F>
void parallel(int64_t count, int64_t work, const F& f) {
  if (count <= 1 || work < kSerialWork || torch::stable::get_num_threads() == 1) {
    if (count > 0) f(int64_t{0}, count);
    return;
  }
  torch::stable::parallel_for(0, count, std::max<int64_t>(1, kSerialWork / 2 / (work / count + 1)),
                              f);
}

}  // namespace qfx::cpu
