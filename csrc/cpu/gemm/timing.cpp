#include "cpu/gemm/timing.h"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

#include "cpu/core/flush.h"
#include "cpu/core/threads.h"

namespace qfx::cpu {
namespace {

double now(clockid_t clock) {
  timespec at;
  clock_gettime(clock, &at);
  return static_cast<double>(at.tv_sec) + 1e-9 * static_cast<double>(at.tv_nsec);
}

class Nowhere final : public TileSink {
 public:
  void load_panel(int64_t, Panel*) const override {}
  void tile(const int32_t*, int64_t, int, int64_t, const Panel&) const override {}
  // Of no rows, so that strips run where they do with outputs.
  bool epilogue_of(const int32_t*, int64_t, int, int64_t, const Panel&,
                   EpilogueArgs* args) const override {
    *args = {};
    return true;
  }
};

// Codes [rows, k] of one format, with its parameters.
struct TimedRows final : RowSource {
  const PackedWeight& w;
  const int8_t* codes;

  TimedRows(const Format& format, const Tuning& tuning, const PackedWeight& w, const int8_t* codes,
            int64_t count)
      : RowSource(make_rows(format, count, w, rows_memory())), w(w), codes(codes) {
    rows.tuning = tuning;
  }

  void fill(int64_t begin, int64_t end) const override {
    for (int64_t m = begin; m < end; ++m) arrange_row(w, codes + m * w.k, 0, m, rows);
  }
  int64_t work() const override { return rows.count * w.k; }
};

}  // namespace

TimedProduct::TimedProduct(int64_t most_rows, int64_t k, int64_t n, int64_t weights)
    : most_rows_(most_rows), weights_(weights), bytes_(round_up(n, kPanel) * padded_k(k)) {
  const int64_t all = weights * bytes_ + most_rows * k;
  int8_t* blocks = memory_.get<int8_t>(all);
  std::fill_n(blocks, all, int8_t{1});
  codes_ = blocks + weights * bytes_;
  w_ = {n, k, padded_k(k), true, nullptr, blocks};  // who keeps no sums needs none of columns
}

void TimedProduct::run(const Format& format, const Tuning& tuning, const PackedWeight& w,
                       int64_t count) const {
  gemm(TimedRows(format, tuning, w, codes_, count), w, Nowhere());
}

double TimedProduct::seconds(const Format& format, const Tuning& tuning, int64_t rows,
                             int64_t calls) {
  if (rows < 0 || rows > most_rows_) {
    throw std::invalid_argument("a product of " + std::to_string(rows) + " rows, made for " +
                                std::to_string(most_rows_));
  }
  const bool alone = thread_count() == 1 || rows * w_.k * w_.n < tuning.serial_steps;
  const clockid_t clock = alone ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
  PackedWeight w = w_;
  if (calls == 0) {
    w.blocks += next_ * bytes_;
    next_ = (next_ + 1) % weights_;
    flush(w.blocks, bytes_);
  } else {
    run(format, tuning, w, rows);
  }
  const double start = now(clock);
  for (int64_t i = 0; i == 0 || i < calls; ++i) run(format, tuning, w, rows);
  return (now(clock) - start) / static_cast<double>(std::max<int64_t>(calls, 1));
}

double share_of_cores(double seconds) {
  const int64_t threads = thread_count();
  const double end = now(CLOCK_MONOTONIC) + seconds;
  std::atomic<int64_t> nanoseconds{0};
  parallel_for(threads, 1, [&](int64_t, int64_t) {
    const double before = now(CLOCK_THREAD_CPUTIME_ID);
    while (now(CLOCK_MONOTONIC) < end) continue;
    const double taken = now(CLOCK_THREAD_CPUTIME_ID) - before;
    nanoseconds += static_cast<int64_t>(taken * 1e9);
  });
  return 1e-9 * static_cast<double>(nanoseconds) / (seconds * static_cast<double>(threads));
}

}  // namespace qfx::cpu
