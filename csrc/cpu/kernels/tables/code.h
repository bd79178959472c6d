// The range of numbers between their extremes, and how these become codes: (Q1), (Q2), (Q4).
#pragma once

#include "cpu/kernels/tables/rows.h"

namespace qfx::cpu {
namespace {  // internal linkage: each file compiles its own, with its flags

constexpr float kSmallestScale = 0x1p-126f;
constexpr int32_t kInfiniteBits = 0x7f800000;

inline float at_least(float x, float least) { return x < least ? least : x; }

inline RowCode faulty_code(float fault, int32_t qmin, int32_t qmax) {  // (Q4)
  return {fault, 0.f, 0, qmin, qmax, false};
}

// Order of floats as order of integers; the inverse is the same.
inline int32_t to_sortable(uint32_t bits) {
  const int32_t b = static_cast<int32_t>(bits);
  return b ^ ((b >> 31) & 0x7fffffff);
}

inline float from_sortable(int32_t order) {
  return __builtin_bit_cast(float, to_sortable(static_cast<uint32_t>(order)));
}

// As signed integers, bit patterns of positive floats are in order and above all negative ones; as
// unsigned integers those of negative floats are in reverse order and above all positive ones.
struct Extremes {
  int32_t most;    // of the signed patterns and 0
  uint32_t least;  // the greatest unsigned pattern
};

inline Range range_between(const Extremes& extremes) {
  const auto [most, least] = extremes;
  const int32_t low = static_cast<int32_t>(least) < 0 ? to_sortable(least) : 0;
  const int32_t size = low < 0 ? static_cast<int32_t>(least & 0x7fffffff) : 0;
  return {size > most ? size : most, low, most};
}

// The nearest integer to a number below 2^22.
inline int32_t nearest(float x) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  return __builtin_bit_cast(int32_t, x + kRound) - __builtin_bit_cast(int32_t, kRound);
}

inline RowCode code_of_range(const Range& range, const CodeSpec& spec) {
  const int32_t qmax = (1 << (spec.bits - 1)) - 1;
  const int32_t qmin = spec.symmetric ? -qmax : -qmax - 1;
  if (range.magnitude >= kInfiniteBits) {
    return faulty_code(__builtin_bit_cast(float, range.magnitude), qmin, qmax);
  }
  if (spec.symmetric) {  // (Q1)
    const float scale = __builtin_bit_cast(float, range.magnitude) / static_cast<float>(qmax);
    const float kept = at_least(scale, kSmallestScale);
    return {kept, 1.f / kept, 0, qmin, qmax, true};
  }
  const float low = from_sortable(range.low), high = from_sortable(range.high);
  const float n = static_cast<float>(qmax - qmin);
  const float scale = at_least(high / n - low / n, kSmallestScale);  // (Q2)
  const float inverse = 1.f / scale;
  const int32_t zero = qmin - nearest(low * inverse);
  return {scale, inverse, zero < qmin ? qmin : zero > qmax ? qmax : zero, qmin, qmax, true};
}

}  // namespace
}  // namespace qfx::cpu
