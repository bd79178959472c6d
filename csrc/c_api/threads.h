// The number of threads of the library of programs; see cpu/core/threads.h.
#pragma once

#include <cstdint>

namespace qfx {

inline constexpr int64_t kMostThreads = 1024;

// Throws std::invalid_argument for a number that is not from 1 to kMostThreads.
void set_threads(int64_t count);

}  // namespace qfx
