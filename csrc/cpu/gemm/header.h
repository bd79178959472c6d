// The headers of packed weights, which say what follows and hold a checksum of it and one of
// themselves. The latter is read at each call, the former before a weight's first use
// (integrity.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>

#include "cpu/core/checksum.h"

namespace qfx::cpu {

inline constexpr char kWeightMagic[4] = {'Q', 'F', 'X', 'W'};
inline constexpr uint32_t kWeightVersion = 4;

// What the codes of a group are shifted by.
enum class Shift : uint32_t { kNone, kZeroPoints, kMinimums };

struct PackedHeader {
  char magic[4];  // QFXW
  uint32_t version;
  uint32_t bits;       // 8, 5 or 4
  uint32_t shift;      // a Shift
  uint32_t scales;     // the Dtype of scales and minimums
  uint32_t magnitude;  // max |code| of 8 bits: it decides what is exact without VNNI
  int64_t n, k;
  int64_t group;         // elements of K whose products are summed by themselves, 0 for all
  int64_t scale_group;   // elements of K that share a scale: the group, or 0 for all
  uint64_t contents;     // checksum of what follows the header
  uint64_t reserved[7];  // 0: room for leading dimensions and the window of a convolution
  uint64_t sum;          // checksum of the header, in which it is 0
};
static_assert(sizeof(PackedHeader) == 128);

template <typename Header>
uint64_t sum_of(Header header) {
  header.sum = 0;
  return checksum(&header, sizeof(header) / kChecked);
}

// Writes the header with its sum.
template <typename Header>
void write_header(Header header, const char (&magic)[4], int8_t* out) {
  std::memcpy(header.magic, magic, sizeof(magic));
  header.sum = sum_of(header);
  std::memcpy(out, &header, sizeof(header));
}

// What is wrong with a header of the right magic, version and sizes, or an empty string.
template <typename Header>
std::string fault_of(const Header& header) {
  const bool zero = std::all_of(std::begin(header.reserved), std::end(header.reserved),
                                [](uint64_t word) { return word == 0; });
  if (!zero) return "the reserved bytes of its header are not zero";
  if (header.sum != sum_of(header)) return "its header is damaged";
  return "";
}

}  // namespace qfx::cpu
