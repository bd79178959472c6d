// A packed weight of int8 codes: a header of 128 bytes (header.h), then P = ceil(N / 32) panels of
// 32 rows, first the values of each panel,
//     scale       float32 [S][32]  S = 1 where a row has one scale, else G = ceil(K / group)
//     zero point  int32 [S][32]    where there are any
//     sums        int32 [T][32]    of the codes of each group; T = 1 where all of K is one, else G
// then the codes of each panel, int8 [Kp / 4][32][4]: W[n][k] = codes[k / 4][n % 32][k % 4].
// Kp is K rounded up to 64; what lies beyond N and K is zero.
#pragma once

#include <cstdint>

#include "cpu/gemm/header.h"
#include "cpu/kernels/tables/panel.h"

namespace qfx::cpu {

inline int64_t round_up(int64_t x, int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

inline int64_t padded_k(int64_t k) { return round_up(k, kKMultiple); }

// Weights up to this magnitude are narrow (kernels.h).
inline constexpr uint32_t kNarrow = 64;

// The codes of a panel follow those of the panel before; its values lie `value_step` numbers after
// the values of the panel before.
struct PackedWeight {
  int64_t n, k, padded_k;
  bool narrow;
  const int32_t* colsum;  // of each group
  const int8_t* blocks;
  const float* scale = nullptr;
  int64_t value_step = kPanel;
  const int32_t* zero = nullptr;  // or null where there is none
  int64_t group = 0;              // of which all of K may be one
  bool scale_by_group = false;
  uint64_t contents = 0;  // checksum, by the header

  int64_t groups() const { return (k + group - 1) / group; }
  int64_t panels() const { return (n + kPanel - 1) / kPanel; }
  int64_t scale_step() const { return scale_by_group ? kPanel : 0; }  // from group to group
  const int8_t* panel(int64_t p) const { return blocks + p * kPanel * padded_k; }
  const int32_t* sums(int64_t p) const { return colsum + p * value_step; }
  const float* scales(int64_t p) const { return scale + p * value_step; }
  const int32_t* zeros(int64_t p) const {
    return zero == nullptr ? nullptr : zero + p * value_step;
  }
};

// How a weight of int8 codes is stored.
struct PackedKind {
  int64_t group = 0;  // as in the header
  bool scale_by_group = false, zeros = false;

  int64_t groups(int64_t k) const { return group == 0 ? 1 : (k + group - 1) / group; }
  int64_t scales(int64_t k) const { return scale_by_group ? groups(k) : 1; }
  // Bytes of the values and of the codes of a panel.
  int64_t values(int64_t k) const { return 4 * kPanel * (scales(k) * (zeros ? 2 : 1) + groups(k)); }
  int64_t codes(int64_t k) const { return kPanel * padded_k(k); }
};

// Bytes of a packed [n, k] weight.
int64_t packed_size(int64_t n, int64_t k, const PackedKind& kind = {});

// What a weight is packed from: codes [N, K]; scale and zero, contiguous, [N, S], or null for 1 and
// 0.
struct PackedParts {
  const int8_t* codes;
  int64_t n, k, stride_n, stride_k;
  const float* scale = nullptr;
  const int32_t* zero = nullptr;
};

// Packs into out[packed_size] and returns the checksum of the contents.
uint64_t pack(const PackedParts& from, const PackedKind& kind, int8_t* out);

// One panel: columns <= 32 of w into colsum[32] and block[Kp/4][32][4], padding included.
void pack_panel(const int8_t* w, int64_t columns, int64_t k, int64_t stride_n, int64_t stride_k,
                int32_t* colsum, int8_t* block);

// Codes [N, K].
void unpack(const PackedWeight& w, int8_t* codes);

// Scales and zero points [N, S]; 0 where there are none of these.
void unpack_values(const PackedWeight& w, float* scale, int32_t* zero);

// The packed weight after `header`, whose fields and size are right.
PackedWeight packed_weight_of(const PackedHeader& header, const int8_t* data);
PackedKind packed_kind_of(const PackedHeader& header);

}  // namespace qfx::cpu
