// The threads of the native tests: new ones for every call, as many as a test asks for.
#pragma once

#include <cstdint>

namespace qfx::cpu {

extern int64_t test_threads;
extern int64_t test_forks;  // calls of parallel_for

}  // namespace qfx::cpu
