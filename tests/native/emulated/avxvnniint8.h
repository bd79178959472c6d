// AVX-VNNI-INT8 in plain C++, put before a file that uses its intrinsic.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace qfx::emulated {

// sum[i] + sum_j a[4 i + j] b[4 i + j]
inline __m256i multiply_add(__m256i sum, __m256i a, __m256i b) {
  int32_t sums[8];
  int8_t left[32], right[32];
  std::memcpy(sums, &sum, 32);
  std::memcpy(left, &a, 32);
  std::memcpy(right, &b, 32);
  for (int i = 0; i < 32; ++i) sums[i / 4] += left[i] * right[i];
  std::memcpy(&sum, sums, 32);
  return sum;
}

}  // namespace qfx::emulated

#define _mm256_dpbssd_epi32(sum, a, b) qfx::emulated::multiply_add(sum, a, b)
