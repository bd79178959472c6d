// Memory out of the caches, to time what reads it as a model does that has read all else since.
#pragma once

#include <cstdint>

namespace qfx::cpu {

// Out of every cache of the processor, however large it is; on one that cannot, nothing happens.
void flush(const int8_t* data, int64_t bytes);

}  // namespace qfx::cpu
