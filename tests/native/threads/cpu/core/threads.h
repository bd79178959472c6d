// In place of torch's threads: new ones for every call, as many as a test asks for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace qfx::cpu {

inline int64_t test_threads = 1;
inline int64_t test_forks = 0;  // calls of parallel_for

inline int64_t thread_count() { return test_threads; }

template <typename F>
void parallel_for(int64_t count, int64_t grain, const F& f) {
  ++test_forks;
  const int64_t parts = std::min(thread_count(), (count + grain - 1) / grain);
  std::vector<std::thread> others;
  for (int64_t i = 1; i < parts; ++i) {
    others.emplace_back([=, &f] { f(count * i / parts, count * (i + 1) / parts); });
  }
  f(int64_t{0}, count / parts);
  for (std::thread& other : others) other.join();
}

}  // namespace qfx::cpu
