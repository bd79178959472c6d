// The packed 1-bit weight, layout K32N32, version 2, one flat buffer:
//     header 64 bytes, blocks uint32 [Np/32][Kp/32][32]
//     (W[n][k] >= 0) = blocks[n / 32][k / 32][n % 32] >> (k % 32) & 1
// Np is N rounded up to 32, Kp is K rounded up to 32; the padding is zero. A column's 32 bits are
// one lane of vpopcntd; NEON's cnt counts its bytes and uaddlp, twice, adds them up to the same
// lane.
#pragma once

#include <cstdint>
#include <string>

#include "cpu/binary/kernels.h"
#include "cpu/gemm/quantize.h"

namespace qfx::cpu {

inline constexpr int64_t kMaxBinaryK = INT32_MAX;         // the sum of K signs is an int32
inline constexpr int64_t kMaxBinaryN = int64_t{1} << 31;  // so that no size overflows

inline constexpr int64_t kBitsHeader = 64;  // bytes

struct PackedBits {
  int64_t n, k;
  const uint8_t* blocks;
  uint64_t contents = 0;  // checksum, by the header

  int64_t groups() const { return (k + kBitGroup - 1) / kBitGroup; }
  int64_t panels() const { return (n + kPanel - 1) / kPanel; }
  const uint8_t* panel(int64_t p) const { return blocks + p * groups() * kPanel * kBitGroupBytes; }
};

// Bytes of a packed [n, k] weight.
int64_t packed_bits_size(int64_t n, int64_t k);

// Writes the header of a packed [n, k] weight before its blocks, which are there, and returns the
// checksum of the contents.
uint64_t finish_packed_bits(int64_t n, int64_t k, int8_t* out);

// bits[groups][4] of column n of a panel into block[groups][32][4].
void place_column(const uint8_t* bits, int64_t groups, int64_t n, uint8_t* block);

// Reads a buffer of `size` bytes. Returns what is wrong with it, or an empty string.
std::string open_packed_bits(const int8_t* data, int64_t size, PackedBits* weight);

}  // namespace qfx::cpu
