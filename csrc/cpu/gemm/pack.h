// The packed weight, layout K4N32, version 3, one flat buffer:
//     header 64 bytes, colsum int32 [Np], blocks int8 [Np/32][Kp/4][32][4]
//     W[n][k] = blocks[n / 32][k / 4][n % 32][k % 4],   colsum[n] = sum_k W[n][k]
// Np is N rounded up to 32, Kp is K rounded up to 64; the padding is zero. Packed for scales that
// each serve `group` consecutive k, a multiple of 64, it ends with the column sums of each of the G
// = ceil(K / group) groups:
//     group_sums int32 [Np/32][G][32]
// The header holds a checksum of what is behind it and one of itself. The latter is read at each
// call, the former before a weight's first use (whole.h).
#pragma once

#include <cstdint>
#include <string>

#include "cpu/kernels/tables/panel.h"

namespace qfx::cpu {

inline int64_t round_up(int64_t x, int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

inline int64_t padded_k(int64_t k) { return round_up(k, kKMultiple); }

struct PackedHeader {
  char magic[4];
  uint32_t version, layout;
  uint32_t magnitude;  // max |W|, which decides what is exact on processors without VNNI
  int64_t n, k;
  int64_t group;      // elements of K that share a scale, 0 for all
  uint64_t contents;  // checksum of what is behind the header
  uint64_t reserved;  // 0
  uint64_t sum;       // checksum of the header, in which it is 0
};
static_assert(sizeof(PackedHeader) == 64);

// The header with its sum, at `out`.
void write_header(PackedHeader header, int8_t* out);

// What is wrong with a header of the right magic, version and sizes, or an empty string.
std::string fault_of(const PackedHeader& header);

// Weights up to this magnitude are narrow (kernels.h).
inline constexpr uint32_t kNarrow = 64;

struct PackedWeight {
  int64_t n, k, padded_k;
  bool narrow;
  const int32_t* colsum;
  const int8_t* blocks;
  int64_t group = 0;  // elements of K that share a scale: all of them are one group too
  const int32_t* group_sums = nullptr;
  uint64_t contents = 0;  // checksum, by the header

  int64_t groups() const { return (k + group - 1) / group; }
  int64_t panels() const { return (n + kPanel - 1) / kPanel; }
  const int8_t* panel(int64_t p) const { return blocks + p * kPanel * padded_k; }
};

// Bytes of a packed [n, k] weight.
int64_t packed_size(int64_t n, int64_t k, int64_t group = 0);

// Packs w[n * stride_n + k * stride_k] into out[packed_size(n, k, group)] and returns the checksum
// of the contents.
uint64_t pack(const int8_t* w, int64_t n, int64_t k, int64_t stride_n, int64_t stride_k,
              int8_t* out, int64_t group = 0);

// One panel: columns <= 32 of w into colsum[32] and block[Kp/4][32][4], padding included.
void pack_panel(const int8_t* w, int64_t columns, int64_t k, int64_t stride_n, int64_t stride_k,
                int32_t* colsum, int8_t* block);

void unpack(const PackedWeight& w, int8_t* out);

// Reads a buffer of `size` bytes. Returns what is wrong with its header, or an empty string.
std::string open_packed(const int8_t* data, int64_t size, PackedWeight* weight);

}  // namespace qfx::cpu
