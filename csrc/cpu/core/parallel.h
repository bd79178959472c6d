// Work on several threads, and on one where waking the others would not repay.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/core/parts.h"
#include "cpu/core/threads.h"

namespace qfx::cpu {

// Steps (multiply-accumulates of AVX2, or 16 per element moved) that take about 5 microseconds.
inline constexpr int64_t kSerialWork = 1 << 19;

// Whether this thread already runs a share of something.
inline thread_local bool in_share = false;

// How many of `most` threads so many steps repay, each with half of kSerialWork at least.
inline int64_t threads_for(int64_t work, int64_t most) {
  return std::clamp<int64_t>(work < kSerialWork ? 1 : work / (kSerialWork / 2), 1, most);
}

// The threads that this one may wake, itself included.
inline int64_t threads_here() { return in_share ? 1 : thread_count(); }

inline int64_t threads_for(int64_t work) {
  return work < kSerialWork ? 1 : threads_for(work, threads_here());
}

// f(i) for each of `count` shares, on a thread of its own where there are as many.
template <typename F>
void on_threads(int64_t count, const F& f) {
  if (count == 1) return f(int64_t{0});
  parallel_for(count, 1, [&](int64_t begin, int64_t end) {
    struct Mark {
      bool before = in_share;
      Mark() { in_share = true; }
      ~Mark() { in_share = before; }
    } const mark;
    for (int64_t i = begin; i < end; ++i) f(i);
  });
}

// Runs f(begin, end) over 0..count, of `work` steps in all.
template <typename F>
void parallel(int64_t count, int64_t work, const F& f) {
  const int64_t threads = std::min(threads_for(work), count);
  if (count <= 0) return;
  on_threads(threads, [&](int64_t i) { f(i * count / threads, (i + 1) * count / threads); });
}

// first(begin, end) over 0..count, in parts of `part`; when all of it is done, second(i) for each
// of `threads` shares, on the same threads.
template <typename F, typename G>
void in_two_steps(int64_t threads, int64_t count, int64_t part, const F& first, const G& second) {
  if (threads == 1) {
    first(int64_t{0}, count);
    return second(int64_t{0});
  }
  Parts parts(threads, count, part);
  on_threads(threads, [&](int64_t i) {
    if (parts.run(i, first)) second(i);
  });
}

}  // namespace qfx::cpu
