// torch's own pool of threads, the only use of torch below the operators: the native tests put
// another header of this name in its place.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstdint>
#include <exception>

namespace qfx::cpu {

inline int64_t thread_count() { return torch::stable::get_num_threads(); }

// Runs f(begin, end) over 0..count, in parts of at least `grain`. What f throws, the first of it,
// is carried past torch's C interface, which would keep only that something failed.
template <typename F>
void parallel_for(int64_t count, int64_t grain, const F& f) {
  std::exception_ptr thrown;
  std::atomic_flag failed = ATOMIC_FLAG_INIT;
  torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    try {
      f(begin, end);
    } catch (...) {
      if (!failed.test_and_set()) thrown = std::current_exception();
    }
  });
  if (thrown) std::rethrow_exception(thrown);
}

}  // namespace qfx::cpu
