// A group of 4- or 5-bit codes becomes bytes, as the int8 kernels read them.
#pragma once

#include <cstring>

#include "cpu/kernels/tables/lowbit.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

constexpr int kLineCodes = kPanel * kGroup;  // of 4 k of a panel

// 16 in each byte whose bit is set, 8 of them.
inline uint64_t sixteens(uint64_t bits) {
  const uint64_t apart = bits * 0x0101010101010101u & 0x8040201008040201u;
  return ((apart + 0x7f7f7f7f7f7f7f7fu) & 0x8080808080808080u) >> 3;
}

inline void fifth_bits(const uint64_t* line, uint8_t* out) {
  for (int i = 0; i < kLineCodes / 8; ++i) {
    const uint64_t bytes = sixteens(line[i / 8] >> 8 * (i % 8) & 0xff);
    std::memcpy(out + 8 * i, &bytes, sizeof(bytes));
  }
}

// `kBits` codes u - zero. Sums stay in 16 bits: a group has at most 128 codes below 32.
template <int kBits>
void unpack_group(const uint8_t* block, int64_t depth, int64_t group, const uint8_t* zero,
                  int8_t* codes, int32_t* colsum) {
  const uint8_t* nibbles = block + kPanel * sizeof(uint16_t);
  const uint8_t* fifth = nibbles + group / 2 * kPanel;
  uint8_t less[kLineCodes];
  for (int i = 0; i < kLineCodes; ++i) less[i] = zero == nullptr ? 1 << (kBits - 1) : zero[i / 4];
  int16_t sums[kLineCodes] = {};
  for (int64_t k = 0; k < depth; k += 2 * kGroup, nibbles += kLineCodes) {
    uint8_t high[2][kLineCodes] = {};
    if constexpr (kBits == 5) {
      uint64_t line[4];
      std::memcpy(line, fifth + k / 8 * sizeof(line), sizeof(line));
      fifth_bits(line, high[0]);
      fifth_bits(line + 2, high[1]);
    }
    int8_t* low_codes = codes + k * kPanel;
    int8_t* high_codes = low_codes + kLineCodes;
    for (int i = 0; i < kLineCodes; ++i) {
      const uint8_t low = (nibbles[i] & 15) | high[0][i], up = (nibbles[i] >> 4) | high[1][i];
      low_codes[i] = static_cast<int8_t>(low - less[i]);
      high_codes[i] = static_cast<int8_t>(up - less[i]);
    }
    for (int i = 0; i < kLineCodes; ++i) {
      sums[i] = static_cast<int16_t>(sums[i] + low_codes[i] + high_codes[i]);
    }
  }
  for (int n = 0; n < kPanel; ++n) {
    colsum[n] = sums[4 * n] + sums[4 * n + 1] + sums[4 * n + 2] + sums[4 * n + 3];
  }
}

constexpr LowbitKernels kLowbitKernels = {.unpack = {unpack_group<4>, unpack_group<5>}};

}  // namespace
}  // namespace qfx::cpu
