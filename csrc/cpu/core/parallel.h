// Work on several threads, and on one where waking the others would not repay.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/core/threads.h"

namespace qfx::cpu {

// Steps (multiply-accumulates, or 16 per element moved) that take about 5 microseconds.
inline constexpr int64_t kSerialWork = 1 << 19;

// Runs f(begin, end) over 0..count; `work` is the total number of steps, of which `serial` are not
// worth another thread.
template <typename F>
void parallel(int64_t count, int64_t work, const F& f, int64_t serial = kSerialWork) {
  if (count <= 1 || work < serial || thread_count() == 1) {
    if (count > 0) f(int64_t{0}, count);
    return;
  }
  parallel_for(count, std::max<int64_t>(1, serial / 2 / (work / count + 1)), f);
}

}  // namespace qfx::cpu
