// AVX-512 VNNI: vpdpbusd accumulates u8 x s8 products in 32 bits, so it never saturates.
// Operand format: u8 = q + 128; the row constant 128 * colsum[n] is taken off in the epilogue.
#include <immintrin.h>

#include <array>
#include <utility>

#include "cpu/kernels/rows/fetch.h"
#include "cpu/kernels/rows/loops.h"
#include "cpu/kernels/rows/offset.h"
#include "cpu/kernels/rows/row_pointers.h"
#include "cpu/kernels/tables/attention.h"
#include "cpu/kernels/x86/float_lines.h"
#include "cpu/kernels/x86/group_tiles512.h"
#include "cpu/kernels/x86/integer_lines.h"
#include "cpu/kernels/x86/lowbit512.h"
#include "cpu/kernels/x86/multiply_chains.h"

namespace qfx::cpu {
namespace {

// rows x 32 columns of one panel or of two. 2 accumulators a row, panel and depth step: up to 24
// registers, 2 for the weights. Few rows take several steps at once, or the latency of vpdpbusd
// would bound them. Every loop over the accumulators is unrolled, or GCC spills them.
// Each step fetches kFetched lines of a panel. begin(r, half) is what to add the products of a line
// to, end(r, left, right) receives the sums.
template <int kPanels, int kRows, int kHint, int kFetched, typename Begin, typename End>
inline __attribute__((always_inline)) void products(const uint8_t* a, int64_t lda, const int8_t* b,
                                                    int64_t apart, int64_t groups,
                                                    const int8_t* ahead, const Begin& begin,
                                                    const End& end) {
  constexpr int kLines = kPanels * kRows;
  constexpr int kSteps = kLines <= 2 ? 4 : kLines <= 5 ? 2 : 1;  // divides groups
  __m512i acc[kSteps][kLines][2];
#pragma GCC unroll 4
  for (int s = 0; s < kSteps; ++s) {
#pragma GCC unroll 12
    for (int r = 0; r < kLines; ++r) {
      acc[s][r][0] = s == 0 ? begin(r, 0) : _mm512_setzero_si512();
      acc[s][r][1] = s == 0 ? begin(r, 1) : _mm512_setzero_si512();
    }
  }
  RowPointers<uint8_t, kRows> rows(a, lda);
  for (int64_t g = 0; g < groups; g += kSteps) {
#pragma GCC unroll 4
    for (int s = 0; s < kSteps; ++s) {
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) {
        fetch<kHint>(ahead + p * apart);
        if constexpr (kFetched == 2) fetch<kHint>(ahead + p * apart + 64);
        const __m512i w0 = _mm512_loadu_si512(b + p * apart);
        const __m512i w1 = _mm512_loadu_si512(b + p * apart + 64);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
          const __m512i x = word_at(rows.of(r));
          const int line = p * kRows + r;
          acc[s][line][0] = _mm512_dpbusd_epi32(acc[s][line][0], x, w0);
          acc[s][line][1] = _mm512_dpbusd_epi32(acc[s][line][1], x, w1);
        }
      }
      rows.move(kGroup);
      b += kPanel * kGroup;
      if constexpr (kHint != kNothing) ahead += kFetched * 64;
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kLines; ++r) {
#pragma GCC unroll 4
    for (int s = 0; s < kSteps; ++s) {  // GCC 12 would copy them all in each step
      asm("" : "+v"(acc[s][r][0]), "+v"(acc[s][r][1]));
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kLines; ++r) {
#pragma GCC unroll 4
    for (int s = 1; s < kSteps; ++s) {
      acc[0][r][0] = _mm512_add_epi32(acc[0][r][0], acc[s][r][0]);
      acc[0][r][1] = _mm512_add_epi32(acc[0][r][1], acc[s][r][1]);
    }
    end(r, acc[0][r][0], acc[0][r][1]);
  }
}

template <int kPanels, int kRows, int kHint, int kFetched = 2>
inline void strip(const uint8_t* a, int64_t lda, const int8_t* b, int64_t apart, int64_t groups,
                  const int8_t* ahead, int32_t* out, bool accumulate) {
  const auto begin = [=](int r, int half) {
    return accumulate ? _mm512_loadu_si512(out + r * kPanel + half * 16) : _mm512_setzero_si512();
  };
  const auto end = [=](int r, __m512i left, __m512i right) {
    _mm512_storeu_si512(out + r * kPanel, left);
    _mm512_storeu_si512(out + r * kPanel + 16, right);
  };
  products<kPanels, kRows, kHint, kFetched>(a, lda, b, apart, groups, ahead, begin, end);
}

template <int kRows, int kHint, int kFetched = 2>
void tile(const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups, const int8_t* ahead,
          int32_t* out, bool accumulate) {
  strip<1, kRows, kHint, kFetched>(a, lda, b, 0, groups, ahead, out, accumulate);
}

// The left 16 columns alone.
template <int kRows>
void narrow_tile(const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups, const int8_t*,
                 int32_t* out, bool accumulate) {
  __m512i acc[kRows];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    acc[r] = accumulate ? _mm512_loadu_si512(out + r * kPanel) : _mm512_setzero_si512();
  }
  RowPointers<uint8_t, kRows> rows(a, lda);
  for (int64_t g = 0; g < groups; ++g, b += kPanel * kGroup) {
    const __m512i w = _mm512_loadu_si512(b);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      acc[r] = _mm512_dpbusd_epi32(acc[r], word_at(rows.of(r)), w);
    }
    rows.move(kGroup);
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    _mm512_storeu_si512(out + r * kPanel, acc[r]);
    if (!accumulate) _mm512_storeu_si512(out + r * kPanel + 16, _mm512_setzero_si512());
  }
}

template <int kRows, int kHint>
void pair(const uint8_t* a, int64_t lda, const int8_t* b, int64_t apart, int64_t groups,
          int64_t ahead, int32_t* out) {
  strip<2, kRows, kHint>(a, lda, b, apart, groups, b + ahead, out, false);
}

// Tiles of panels that lie `apart` bytes from one another, which become scores as score_panels
// says, of rows that see all keys. The zero points are taken off before the products are added.
// (A3)
template <int kRows>
void scores(const uint8_t* a, int64_t lda, const int8_t* b, int64_t apart, int64_t groups,
            const ScoreArgs* args) {
  const __m512i mul = _mm512_set1_epi32(-args->mul);
  for (int64_t p = 0; p < args->panels; ++p, b += apart) {
    const int32_t* colsum = args->colsum + p * kPanel;
    const __m512i zero[2] = {_mm512_mullo_epi32(mul, _mm512_loadu_si512(colsum)),
                             _mm512_mullo_epi32(mul, _mm512_loadu_si512(colsum + 16))};
    const float* key_scale = args->key_scale + p * kPanel;
    const auto begin = [&](int, int half) { return zero[half]; };
    const auto end = [&](int r, __m512i left, __m512i right) {
      const __m512 scale = _mm512_set1_ps(args->row_scale[r]);
      const auto score = [&](__m512i sums, const float* of_keys) {
        return _mm512_mul_ps(_mm512_cvtepi32_ps(sums),
                             _mm512_mul_ps(scale, _mm512_loadu_ps(of_keys)));
      };
      float *out = args->out + r * args->stride + p * kPanel, *top = args->top + r * kPanel;
      const __m512 low = score(left, key_scale), high = score(right, key_scale + 16);
      _mm512_storeu_ps(out, low);
      _mm512_storeu_ps(out + 16, high);
      _mm512_storeu_ps(top, _mm512_max_ps(high, _mm512_max_ps(low, _mm512_loadu_ps(top))));
    };
    products<1, kRows, kNothing, 0>(a, lda, b, 0, groups, b, begin, end);
  }
}

int64_t multiply(int64_t rounds) {
  const __m512i b = _mm512_set1_epi8(1);
  const auto next = [&](__m512i x, __m512i a) { return _mm512_dpbusd_epi32(x, a, b); };
  return 64 * run_chains<16>(rounds, b, next);
}

// What went past the caches is there before another thread reads it.
void release() { _mm_sfence(); }

constexpr int kTallest = 12, kFew = 6;  // rows; of a pair 6 fill the registers

template <int kHint, int kFetched, int... kLess>
constexpr std::array<TileFn, sizeof...(kLess)> tiles_of(std::integer_sequence<int, kLess...>) {
  return {tile<kLess + 1, kHint, kFetched>...};
}

template <int... kLess>
constexpr std::array<ScoreTileFn, sizeof...(kLess)> scores_of(
    std::integer_sequence<int, kLess...>) {
  return {scores<kLess + 1>...};
}

template <int... kLess>
constexpr std::array<TileFn, sizeof...(kLess)> narrow_tiles_of(
    std::integer_sequence<int, kLess...>) {
  return {narrow_tile<kLess + 1>...};
}

constexpr auto kNarrowTiles = narrow_tiles_of(std::make_integer_sequence<int, kTallest>());
constexpr auto kScores = scores_of(std::make_integer_sequence<int, kTallest>());

template <int kHint, int... kLess>
constexpr std::array<PairFn, sizeof...(kLess)> pairs_of(std::integer_sequence<int, kLess...>) {
  return {pair<kLess + 1, kHint>...};
}

template <int kHint, int kRows, int kFetched = 2>
constexpr auto kTiles = tiles_of<kHint, kFetched>(std::make_integer_sequence<int, kRows>());

template <int kHint>
constexpr auto kPairs = pairs_of<kHint>(std::make_integer_sequence<int, kFew>());

template <bool kPairs, int kHint, int kRows = kTallest>
constexpr const GroupTileFn* kInGroups = kGroupTiles<kHint, kPairs, kRows>.data();

constexpr GroupTiles kGroups = {
    .tiles = {kInGroups<false, kNothing>, kInGroups<true, kNothing>},
    .prefetching = {kInGroups<false, kT1>, kInGroups<true, kT1>},
    .few = {{kInGroups<false, kT0>, kInGroups<false, kT1, kFew>, kInGroups<false, kNta, kFew>},
            {kInGroups<true, kT0>, kInGroups<true, kT1, kFew>, kInGroups<true, kNta, kFew>}}};

constexpr Format kFormat = {
    .name = "s8s8",
    .tile_rows = kTallest,
    .bytes_per_code = 1,
    .k_multiple = 16,
    .mul_offset = 128,
    .tiles = kTiles<kNothing, kTallest>.data(),
    .prefetching_tiles = kTiles<kT1, kTallest>.data(),
    .half_prefetching_tiles = kTiles<kT1, kTallest, 1>.data(),
    .narrow_tiles = kNarrowTiles.data(),
    .arrange = arrange_offset<128>,
    .release = release,
    .multiply = multiply,
    .few = {kFew,
            {kTiles<kT0, kTallest>.data(), kTiles<kT1, kFew>.data(), kTiles<kNta, kFew>.data()}},
    .pairs = {kFew, {kPairs<kT0>.data(), kPairs<kT1>.data(), kPairs<kNta>.data()}},
    .groups = &kGroups,
    .scores = kScores.data(),
    .tuning = {.block_depth = 1024, .stream_rows = kFew, .streams = 2, .far_bytes = 1 << 20}};

constexpr SumKernels kWithLines = {
    .epilogue = finish_all_lines,
    .add_groups = kSumKernels.add_groups,
    .weight_only = kSumKernels.weight_only,
    .finish_floats = finish_all_float_lines,
};

constexpr LowbitKernels kLowbit =
    lowbit_kernels<LowbitTiles>(unpack_group512<4>, unpack_group512<5>);

}  // namespace

const Kernels& kernels_avx512vnni() {
  static constexpr Kernels kernels = {"avx512vnni", &kRowKernels,
                                      &kWithLines,  &kAttentionKernels,
                                      &kLowbit,     {&kFormat, &kFormat, &kFormat, &kFormat}};
  return kernels;
}

}  // namespace qfx::cpu
