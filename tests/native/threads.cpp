#include "threads.h"

#include <algorithm>
#include <thread>
#include <vector>

#include "cpu/core/threads.h"

namespace qfx::cpu {

int64_t test_threads = 1;
int64_t test_forks = 0;

int64_t thread_count() { return test_threads; }

void run_parallel(int64_t count, int64_t grain, void (*f)(void*, int64_t, int64_t), void* context) {
  ++test_forks;
  const int64_t parts = std::min(thread_count(), (count + grain - 1) / grain);
  std::vector<std::thread> others;
  for (int64_t i = 1; i < parts; ++i) {
    others.emplace_back(f, context, count * i / parts, count * (i + 1) / parts);
  }
  f(context, 0, count / parts);
  for (std::thread& other : others) other.join();
}

}  // namespace qfx::cpu
