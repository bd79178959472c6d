// A weight of 4- or 5-bit codes, packed: a header (header.h), then its panels, which
// kernels/tables/lowbit.h describes, N padded to whole ones with zero points.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "cpu/gemm/pack.h"
#include "cpu/kernels/tables/kernels.h"
#include "cpu/kernels/tables/lowbit.h"

namespace qfx::cpu {

// `shift`: what stands before the groups of a panel.
struct LowbitKind {
  int64_t bits, group;  // 4 or 5; 32, 64 or 128
  Shift shift;
  Dtype scales;  // and minimums: bfloat16 or float16

  int64_t block() const { return kPanel * (2 + group / 2 + (bits == 5 ? group / 8 : 0)); }
  int64_t front(int64_t groups) const;  // bytes before the groups of a panel
  int64_t panel(int64_t groups) const { return front(groups) + groups * block(); }
  uint8_t middle() const { return static_cast<uint8_t>(1 << (bits - 1)); }  // u of the code 0
};

struct LowbitWeight {
  PackedWeight shape;  // without blocks and sums
  LowbitKind kind;
  const uint8_t* panels;

  const uint8_t* panel(int64_t p) const { return panels + p * kind.panel(shape.groups()); }
  const uint8_t* block(int64_t p, int64_t g) const {
    return panel(p) + kind.front(shape.groups()) + g * kind.block();
  }
  // uint8 [G][32] or uint16 [G][32], or null.
  const uint8_t* shifts(int64_t p) const;
  const uint8_t* zero(int64_t p, int64_t g) const;
  // Codes of a group that there are, and what is read of them.
  int64_t length(int64_t g) const { return std::min(kind.group, shape.k - g * kind.group); }
  int64_t depth(int64_t g) const { return round_up(length(g), kGroupMultiple); }
};

// What a weight is packed from: codes [N, K], all else [N, G], contiguous; zero and minimum or
// null.
struct LowbitParts {
  const int8_t* codes;
  const float* scale;
  const int32_t* zero;
  const float* minimum;
  int64_t n, k;
};

bool is_lowbit_group(int64_t group);

int64_t lowbit_size(int64_t n, int64_t k, const LowbitKind& kind);

// bfloat16 if all values have so few bits, float16 if they have those, or none.
std::optional<Dtype> half_type_of(const Kernels& kernels, const float* values, int64_t count);
bool fits_float16(const Kernels& kernels, const float* values, int64_t count);

// Packs into out[lowbit_size] and returns the checksum of the contents.
uint64_t pack_lowbit(const Kernels& kernels, const LowbitParts& from, const LowbitKind& kind,
                     int8_t* out);

// The inverse; what there is none of becomes 0.
struct LowbitUnpacked {
  int8_t* codes;
  float* scale;
  int32_t* zero;
  float* minimum;
};
void unpack_lowbit(const Kernels& kernels, const LowbitWeight& w, const LowbitUnpacked& to);

// What is wrong with the fields of a header that only low-bit weights have, or an empty string.
std::string fault_of_lowbit(const PackedHeader& header);

// The packed weight after `header`, whose fields and size are right.
LowbitWeight lowbit_weight_of(const PackedHeader& header, const int8_t* data);
LowbitKind lowbit_kind_of(const PackedHeader& header);

}  // namespace qfx::cpu
