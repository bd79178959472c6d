// Threads for work on the CPU. Whose they are is chosen when a library is linked: torch's
// (api/threads.cpp), those of the library of programs (c_api/threads.cpp), or those of a test.
#pragma once

#include <cstdint>

#include "cpu/core/thrown.h"

namespace qfx::cpu {

// How many threads the calling one may use, itself included.
int64_t thread_count();

// Runs f(context, begin, end), which throws nothing, over 0..count, in parts of at least `grain`,
// on up to thread_count() threads, and returns when all parts are done. A call from one of the
// parts runs on its own thread. Threads may begin their parts late, and none may wait for a part
// that has not begun.
void run_parallel(int64_t count, int64_t grain, void (*f)(void*, int64_t, int64_t), void* context);

// The same for f(begin, end), which may throw: the first of what it throws is thrown again.
template <typename F>
void parallel_for(int64_t count, int64_t grain, const F& f) {
  struct Call {
    const F& f;
    FirstThrown thrown;
  } call = {f, {}};
  const auto part = [](void* context, int64_t begin, int64_t end) {
    Call& call = *static_cast<Call*>(context);
    try {
      call.f(begin, end);
    } catch (...) {
      call.thrown.keep();
    }
  };
  run_parallel(count, grain, part, &call);
  call.thrown.throw_again();
}

}  // namespace qfx::cpu
