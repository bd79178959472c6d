// NEON with the matrix product of int8 (ARMv8.6): smmla multiplies 2 rows x 8 k by 8 k x 2 columns,
// s8 x s8 summed in 32 bits. Operand format: the codes themselves, zero padded. Two vectors of
// weights, 4 columns of one group and of the next, become two of 2 columns of both by zipping.
#include <arm_neon.h>

#include "cpu/kernels/rows/offset.h"
#include "cpu/kernels/tables/kernels.h"

namespace qfx::cpu {
namespace {

constexpr int kColumns = 16;          // that a strip takes at a time
constexpr int kDepth = 2;             // groups of a step
constexpr int kPairs = kColumns / 2;  // of columns

// Sums of rows r, r + 1 and 2 columns, row by row.
inline int32x4_t load_sums(const int32_t* out, bool two_rows) {
  const int32x2_t upper = vld1_s32(out);
  return vcombine_s32(upper, two_rows ? vld1_s32(out + kPanel) : upper);
}

inline void store_sums(int32x4_t sums, int32_t* out, bool two_rows) {
  vst1_s32(out, vget_low_s32(sums));
  if (two_rows) vst1_s32(out + kPanel, vget_high_s32(sums));
}

// The 8 codes of a step of two rows. The partner of an odd last row is itself.
inline int8x16_t load_codes(const uint8_t* a, int64_t lda, bool two_rows) {
  const uint8x8_t upper = vld1_u8(a);
  return vreinterpretq_s8_u8(vcombine_u8(upper, two_rows ? vld1_u8(a + lda) : upper));
}

inline int8x16_t zip_low(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s32(vzip1q_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b)));
}

inline int8x16_t zip_high(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s32(vzip2q_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b)));
}

template <int kRows, bool kPrefetch>
inline void strip(const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups,
                  const int8_t* ahead, int32_t* out, bool accumulate) {
  constexpr int kRowPairs = (kRows + 1) / 2;
  int32x4_t sums[kRowPairs][kPairs];
#pragma GCC unroll 4
  for (int r = 0; r < kRowPairs; ++r) {
#pragma GCC unroll 8
    for (int p = 0; p < kPairs; ++p) {
      const int32_t* c = out + 2 * r * kPanel + 2 * p;
      sums[r][p] = accumulate ? load_sums(c, 2 * r + 1 < kRows) : vdupq_n_s32(0);
    }
  }
  for (int64_t g = 0; g < groups; g += kDepth) {
    if constexpr (kPrefetch) {
      __builtin_prefetch(ahead);
      __builtin_prefetch(ahead + 64);
      ahead += kDepth * kColumns * kGroup;
    }
    int8x16_t codes[kRowPairs];
#pragma GCC unroll 4
    for (int r = 0; r < kRowPairs; ++r) {
      codes[r] = load_codes(a + 2 * r * lda, lda, 2 * r + 1 < kRows);
    }
#pragma GCC unroll 4
    for (int v = 0; v < kColumns / 4; ++v) {
      const int8x16_t first = vld1q_s8(b + 16 * v), second = vld1q_s8(b + 16 * v + kPanel * kGroup);
      const int8x16_t left = zip_low(first, second), right = zip_high(first, second);
#pragma GCC unroll 4
      for (int r = 0; r < kRowPairs; ++r) {
        sums[r][2 * v] = vmmlaq_s32(sums[r][2 * v], codes[r], left);
        sums[r][2 * v + 1] = vmmlaq_s32(sums[r][2 * v + 1], codes[r], right);
      }
    }
    a += kDepth * kGroup;
    b += kDepth * kPanel * kGroup;
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRowPairs; ++r) {
#pragma GCC unroll 8
    for (int p = 0; p < kPairs; ++p) {
      store_sums(sums[r][p], out + 2 * r * kPanel + 2 * p, 2 * r + 1 < kRows);
    }
  }
}

template <int kRows, bool kPrefetch>
void tile(const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups, const int8_t* ahead,
          int32_t* out, bool accumulate) {
  strip<kRows, kPrefetch>(a, lda, b, groups, ahead, out, accumulate);
  ahead += groups * kGroup * kColumns;
  strip<kRows, kPrefetch>(a, lda, b + kColumns * kGroup, groups, ahead, out + kColumns, accumulate);
}

template <bool kPrefetch>
constexpr TileFn kTiles[] = {tile<1, kPrefetch>, tile<2, kPrefetch>, tile<3, kPrefetch>,
                             tile<4, kPrefetch>, tile<5, kPrefetch>, tile<6, kPrefetch>};

}  // namespace

const Kernels& kernels_neoni8mm() {
  const Kernels& dot = kernels_neondot();
  // smmla would waste half of its products on a single row.
  static const Format format = {.name = "s8s8k8",
                                .tile_rows = 6,
                                .bytes_per_code = 1,
                                .k_multiple = 16,
                                .mul_offset = 0,
                                .tiles = kTiles<false>,
                                .prefetching_tiles = kTiles<true>,
                                .arrange = arrange_offset<0>,
                                .tuning = {.minimum_rows = 2},
                                .below = dot.formats[0]};
  static const Kernels kernels = {"neoni8mm",    dot.row,    dot.sums,
                                  dot.attention, dot.lowbit, {&format, &format, &format, &format}};
  return kernels;
}

}  // namespace qfx::cpu
