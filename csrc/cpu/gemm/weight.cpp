#include "cpu/gemm/weight.h"

#include <algorithm>
#include <cstring>

#include "types.h"

namespace qfx::cpu {
namespace {

std::string text(int64_t number) { return std::to_string(number); }

// What is wrong with the fields of a header of 8 bits.
std::string fault_of_whole(const PackedHeader& header, int64_t limit) {
  if (header.group < 0 || header.group > limit || header.group % kGroupMultiple != 0) {
    return "its header says groups of " + text(header.group);
  }
  if (header.scale_group != 0 && header.scale_group != header.group) {
    return "its header says scales of " + text(header.scale_group) + " in groups of " +
           text(header.group);
  }
  if (header.shift > static_cast<uint32_t>(Shift::kZeroPoints) || header.scales != 0) {
    return "its header says shift " + text(header.shift) + " and scales of type " +
           text(header.scales) + " beside 8 bits";
  }
  const int64_t longest = header.group == 0 ? header.k : std::min(header.group, header.k);
  if (header.shift != 0 && longest > kMaxGroup) {
    return "its header says zero points in groups of " + text(longest);
  }
  return "";
}

std::string fault_of_fields(const PackedHeader& header) {
  const int64_t limit = int64_t{1} << 40;
  if (header.n < 0 || header.n > limit || header.k < 0 || header.k > kMaxK) {
    return "its header says N=" + text(header.n) + " K=" + text(header.k);
  }
  if (header.bits != 8 && header.bits != 5 && header.bits != 4) {
    return "its header says " + text(header.bits) + " bits, expected 4, 5 or 8";
  }
  if (header.shift > static_cast<uint32_t>(Shift::kMinimums)) {
    return "its header says shift " + text(header.shift);
  }
  return header.bits == 8 ? fault_of_whole(header, limit) : fault_of_lowbit(header);
}

int64_t size_of(const PackedHeader& header) {
  return header.bits == 8 ? packed_size(header.n, header.k, packed_kind_of(header))
                          : lowbit_size(header.n, header.k, lowbit_kind_of(header));
}

}  // namespace

std::string open_weight(const int8_t* data, int64_t size, Weight* weight) {
  PackedHeader header;
  if (size < static_cast<int64_t>(sizeof(header))) {
    return "it has " + text(size) + " bytes, fewer than the header's " + text(sizeof(header));
  }
  std::memcpy(&header, data, sizeof(header));
  if (std::memcmp(header.magic, kWeightMagic, sizeof(kWeightMagic)) != 0) {
    return "it does not start with the magic bytes QFXW that pack_weight writes";
  }
  if (header.version != kWeightVersion) {
    return "it has version " + text(header.version) + ", this build reads version " +
           text(kWeightVersion);
  }
  if (std::string fault = fault_of_fields(header); !fault.empty()) return fault;
  if (const int64_t expected = size_of(header); size != expected) {
    return "it has " + text(size) + " bytes, N=" + text(header.n) + " K=" + text(header.k) +
           " in " + text(header.bits) + " bits takes " + text(expected);
  }
  if (std::string fault = fault_of(header); !fault.empty()) return fault;
  *weight = {};
  weight->bits = header.bits;
  weight->cut = header.group != 0;
  if (header.bits == 8) {
    weight->whole = packed_weight_of(header, data);
  } else {
    weight->few = lowbit_weight_of(header, data);
  }
  return "";
}

}  // namespace qfx::cpu
