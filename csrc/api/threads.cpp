// Threads of operators: torch's own pool.
#include "cpu/core/threads.h"

#include <torch/csrc/stable/ops.h>

namespace qfx::cpu {

int64_t thread_count() { return torch::stable::get_num_threads(); }

void run_parallel(int64_t count, int64_t grain, void (*f)(void*, int64_t, int64_t), void* context) {
  torch::stable::parallel_for(0, count, grain,
                              [=](int64_t begin, int64_t end) { f(context, begin, end); });
}

}  // namespace qfx::cpu
