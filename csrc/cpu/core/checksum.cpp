#include "cpu/core/checksum.h"

#include <cstring>

namespace qfx::cpu {

// By sums of sums, which take no multiplication.
uint64_t checksum(const void* words, int64_t rows, int64_t first) {
  constexpr int kLanes = kChecked / 8;
  const char* data = static_cast<const char*>(words);
  uint64_t plain[kLanes] = {}, falling[kLanes] = {};  // sum word, sum (rows - r) word
  for (int64_t r = 0; r < rows; ++r, data += kChecked) {
    uint64_t row[kLanes];
    std::memcpy(row, data, kChecked);
    for (int l = 0; l < kLanes; ++l) {
      plain[l] += row[l];
      falling[l] += plain[l];
    }
  }
  uint64_t sum = 0;
  for (int l = 0; l < kLanes; ++l) {
    const uint64_t odd = static_cast<uint64_t>(2 * (first + rows) + 1) * plain[l] - 2 * falling[l];
    sum += static_cast<uint64_t>(2 * l + 1) * odd;
  }
  return sum;
}

}  // namespace qfx::cpu
