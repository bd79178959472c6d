// What a product takes with given parameters, for those who choose among them. What is in use
// stays.
#pragma once

#include <cstdint>

#include "cpu/core/scratch.h"
#include "cpu/gemm/gemm.h"

namespace qfx::cpu {

// Codes [rows, k], at most `most_rows` of them and all 1, times a weight [n, k] of its own:
// arranged and multiplied, the sums left where they are.
class TimedProduct {
 public:
  TimedProduct(int64_t most_rows, int64_t k, int64_t n, int64_t weights);

  // Seconds of one product. `calls`: 0 for one whose weight, the next in turn, comes from memory,
  // as in a model that has read its others since: if they are many, its pages are not at hand
  // either. Else so many in a row of the first weight, after one that is not counted, on average.
  // They are the thread's own where it works alone, which a busy machine disturbs less, and else
  // those on the wall. Throws std::invalid_argument for more rows than there are.
  double seconds(const Format& format, const Tuning& tuning, int64_t rows, int64_t calls);

 private:
  void run(const Format& format, const Tuning& tuning, const PackedWeight& w, int64_t rows) const;

  int64_t most_rows_, weights_, bytes_, next_ = 0;
  Scratch memory_;
  const int8_t* codes_;
  PackedWeight w_;
};

// How much of its core each of torch's threads gets, on average, if all work for so many seconds: 1
// where nothing else runs on this machine, or waits for its turn.
double share_of_cores(double seconds);

}  // namespace qfx::cpu
