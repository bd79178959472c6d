// torch's own pool of threads. The core's only use of torch: the native tests put another header
// of this name in its place.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

namespace qfx::cpu {

inline int64_t thread_count() { return torch::stable::get_num_threads(); }

// Runs f(begin, end) over 0..count, in parts of at least `grain`.
template <typename F>
void parallel_for(int64_t count, int64_t grain, const F& f) {
  torch::stable::parallel_for(0, count, grain, f);
}

}  // namespace qfx::cpu
