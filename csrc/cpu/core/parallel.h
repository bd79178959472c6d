// Work on several threads, and on one where waking the others would not repay.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

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

// Work on 0..count in parts, which a team shares: each member begins with an equal range of its own
// and then helps the others, so that it waits only for parts that are under way. A team may so be
// smaller than was requested.
class Parts {
 public:
  Parts(int64_t members, int64_t count, int64_t part)
      : count_(count),
        part_(part),
        members_(members),
        ranges_(static_cast<size_t>(std::clamp<int64_t>((count + part - 1) / part, 1, members))) {
    const int64_t ranges = static_cast<int64_t>(ranges_.size());
    for (int64_t i = 0; i < ranges; ++i) {
      ranges_[i].next = i * count / ranges;
      ranges_[i].end = (i + 1) * count / ranges;
    }
  }

  // Runs f(begin, end) while parts are left; then whether all of them were done without a throw.
  template <typename F>
  bool run(int64_t member, const F& f) {
    const int64_t ranges = static_cast<int64_t>(ranges_.size()), own = member * ranges / members_;
    for (int64_t i = 0; i < ranges; ++i) run(ranges_[(own + i) % ranges], f);
    return wait();
  }

 private:
  struct alignas(64) Range {
    std::atomic<int64_t> next;
    int64_t end;
  };

  template <typename F>
  void run(Range& range, const F& f) {
    while (range.next.load(std::memory_order_relaxed) < range.end) {  // many come when all is taken
      const int64_t begin = range.next.fetch_add(part_, std::memory_order_relaxed);
      if (begin >= range.end) return;
      const int64_t end = std::min(range.end, begin + part_);
      try {
        f(begin, end);
      } catch (...) {
        failed_.store(true, std::memory_order_relaxed);
        throw;
      }
      done_.fetch_add(end - begin, std::memory_order_release);
    }
  }

  bool wait() const {
    constexpr int kSpins = 100;  // a few microseconds; then others get the core
    for (int i = 0; done_.load(std::memory_order_acquire) < count_; ++i) {
      if (failed_.load(std::memory_order_relaxed)) return false;
      i < kSpins ? relax() : std::this_thread::yield();
    }
    return true;
  }

  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  const int64_t count_, part_, members_;
  std::vector<Range> ranges_;
  alignas(64) std::atomic<int64_t> done_ = 0;
  std::atomic<bool> failed_ = false;
};

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
