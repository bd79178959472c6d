// Work in parts that a team of threads shares, of which each waits only for parts under way.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace qfx::cpu {

// Between two looks at what another thread writes.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Looks until done() says so: some microseconds at full speed, then others get the core.
template <typename F>
void wait_until(const F& done) {
  constexpr int kLooks = 100;
  for (int i = 0; !done(); ++i) i < kLooks ? relax() : std::this_thread::yield();
}

// Work on 0..count. Each member begins with an equal range of its own and then helps the others; a
// team may so be smaller than was requested.
//
// On many cores a line of memory that all write, or that all read anew, costs more than the work.
// So a bit for each range says whether it has parts left, of which helpers read the words and not
// the ranges; and those who wait look at a line that is written once.
class Parts {
 public:
  Parts(int64_t members, int64_t count, int64_t part)
      : part_(part),
        members_(members),
        ranges_(static_cast<size_t>(std::clamp<int64_t>((count + part - 1) / part, 1, members))),
        open_((ranges_.size() + kBits - 1) / kBits) {
    const int64_t ranges = static_cast<int64_t>(ranges_.size());
    for (int64_t i = 0; i < ranges; ++i) {
      ranges_[i].next = ranges_[i].begin = i * count / ranges;
      ranges_[i].end = (i + 1) * count / ranges;
      if (count > 0) open_[i / kBits] |= uint64_t{1} << i % kBits;
    }
    if (count <= 0) state_ = State::kDone;
  }

  // Runs f(begin, end) while parts are left; then whether all of them were done without a throw.
  template <typename F>
  bool run(int64_t member, const F& f) {
    const int64_t ranges = static_cast<int64_t>(ranges_.size());
    for (int64_t i = open_from(member * ranges / members_); i >= 0;) {
      run_range(i, f);
      i = open_from((i + 1) % ranges);
    }
    wait_until([&] { return state_.load(std::memory_order_acquire) != State::kOpen; });
    return state_.load(std::memory_order_relaxed) == State::kDone;
  }

 private:
  static constexpr int64_t kBits = 64;
  enum class State : int { kOpen, kDone, kFailed };

  struct alignas(64) Range {
    std::atomic<int64_t> next, done = 0;
    int64_t begin, end;
  };

  // The range with parts left that comes first from i on, in a circle; -1: none has.
  int64_t open_from(int64_t i) const {
    const int64_t words = static_cast<int64_t>(open_.size()), first = i / kBits;
    const uint64_t before = (uint64_t{1} << i % kBits) - 1;
    for (int64_t n = 0; n <= words; ++n) {
      const int64_t at = (first + n) % words;
      const uint64_t seen = open_[at].load(std::memory_order_relaxed);
      const uint64_t left = n == 0 ? seen & ~before : n == words ? seen & before : seen;
      if (left != 0) return at * kBits + __builtin_ctzll(left);
    }
    return -1;
  }

  template <typename F>
  void run_range(int64_t i, const F& f) {
    Range& range = ranges_[i];
    while (range.next.load(std::memory_order_relaxed) < range.end) {  // many come when all is taken
      const int64_t begin = range.next.fetch_add(part_, std::memory_order_relaxed);
      if (begin >= range.end) return;
      const int64_t end = std::min(range.end, begin + part_);
      if (end == range.end) close(i);
      try {
        f(begin, end);
      } catch (...) {
        state_.store(State::kFailed, std::memory_order_release);
        throw;
      }
      finish(range, end - begin);
    }
  }

  void close(int64_t i) {
    open_[i / kBits].fetch_and(~(uint64_t{1} << i % kBits), std::memory_order_relaxed);
  }

  void finish(Range& range, int64_t count) {
    const int64_t size = range.end - range.begin;
    if (range.done.fetch_add(count, std::memory_order_acq_rel) + count < size) return;
    const int64_t whole = whole_.fetch_add(1, std::memory_order_acq_rel) + 1;
    if (whole < static_cast<int64_t>(ranges_.size())) return;
    state_.store(State::kDone, std::memory_order_release);
  }

  const int64_t part_, members_;
  std::vector<Range> ranges_;
  std::vector<std::atomic<uint64_t>> open_;
  alignas(64) std::atomic<int64_t> whole_ = 0;  // ranges of which all is done
  alignas(64) std::atomic<State> state_ = State::kOpen;
};

}  // namespace qfx::cpu
