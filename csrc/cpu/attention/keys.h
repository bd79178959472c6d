// The codes of a head's keys and values, a scale for each key and for each value: as a cache of
// keys and values may hold them, panel by panel. (A2), (A3)
#pragma once

#include "cpu/attention/attention.h"
#include "cpu/core/scratch.h"
#include "cpu/gemm/pack.h"

namespace qfx::cpu {

// Of one head; Np and Ep are N and E in whole panels.
struct HeadSizes {
  int64_t n, d, e;

  int64_t panels() const { return (n + kPanel - 1) / kPanel; }
  int64_t padded_n() const { return round_up(n, kPanel); }
  int64_t padded_e() const { return round_up(e, kPanel); }
};

// Rows of a head as panels of keys: codes contracted over their features, with a scale for each.
struct KeyPanels {
  int64_t depth;        // features, padded
  const float* center;  // taken off first, or null
  float* scale;         // [Np], NaN where a row is faulty
  int32_t* sums;        // [Np], of the codes
  int8_t* blocks;       // [Np / 32][depth * 32]
};

// Views into a piece of memory of `bytes`; of null they only say how large it must be.
struct HeadCodes {
  PackedWeight k;   // [N, D]
  PackedWeight v;   // [E, N], without column sums
  float* k_scale;   // [Np], NaN where a key or its value is faulty, so that it shows in scores
  float* v_scale;   // [Np], 0 there, and where a value is too small to matter
  int32_t* k_sums;  // [Np]: of a key's codes
  int32_t* v_sums;  // [Np / 32][Ep]: of 32 values' codes
  int8_t *k_blocks, *v_blocks;
  float* center;   // [D]
  bool* centered;  // whether they have one
  int64_t bytes;

  HeadCodes(const HeadSizes& size, char* memory);

  KeyPanels keys() const {
    return {k.padded_k, *centered ? center : nullptr, k_scale, k_sums, k_blocks};
  }
};

// Rows first, first + 1, ... first + count of x, which fill a panel.
void pack_as_keys(const Kernels& kernels, const FloatMatrix& x, int64_t first, int64_t count,
                  const KeyPanels& out);

// The center of keys under the mask of queries, if they have one; before a panel is packed. (A2)
void find_center(const Kernels& kernels, const Attention& a, const void* keys, const char* mask,
                 float* center, bool* centered);

// The keys and values 32 panel, 32 panel + 1, ...
void pack_panel(const Kernels& kernels, const Attention& a, int64_t head, int64_t panel,
                const HeadCodes& out);

// What rotates rows of so many features: blocks of 64, or of 16, or nothing.
inline Transform rotation_of(int64_t features) {
  return {nullptr, features % 64 == 0 ? 64 : features % 16 == 0 ? 16 : 0};
}

}  // namespace qfx::cpu
