// AMX-INT8: tdpbssd multiplies tiles of 16 rows x 64 k and 64 k x 16 columns, s8 x s8 summed in 32
// bits. Operand format: the codes themselves, zero padded. The packed layout is that of its
// weights.
//
// The shapes of the tile registers are state of the thread. Loading them takes as long as several
// products, so tiles do it only where the height differs from the last one's; they are released
// after a thread's last tile (Format::release), since other users of the thread (oneDNN, say) set
// their own, and while tiles are in use every switch of threads saves 8 KB of them.
#include <immintrin.h>

#include <utility>

#include "cpu/kernels/rows/fetch.h"
#include "cpu/kernels/rows/offset.h"
#include "cpu/kernels/tables/kernels.h"
#include "cpu/kernels/x86/amx_groups.h"
#include "cpu/kernels/x86/amx_strips.h"

namespace qfx::cpu {
namespace {

// GCC's tileloadd does not claim to read memory, so nothing here may write what it reads.
template <bool kTall, Passing kPassing, int kHint>
void strip(const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups, const int8_t* ahead,
           int32_t* out, bool accumulate) {
  if (accumulate) {
    _tile_loadd(0, out, kSumStride);
    _tile_loadd(1, out + kHalf, kSumStride);
    if constexpr (kTall) _tile_loadd(2, out + kLower, kSumStride);
    if constexpr (kTall) _tile_loadd(3, out + kLower + kHalf, kSumStride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kTall) _tile_zero(2);
    if constexpr (kTall) _tile_zero(3);
  }
  for (int64_t k = 0; k < groups * kGroup; k += kDepth, a += kDepth, b += kDepth * kPanel) {
    fetch_step<kHint>(ahead + k * kPanel);
    multiply_step<kTall, kPassing>(a, lda, b);
  }
  store_sums<kTall>(out);
}

template <int kRows, Passing kPassing, int kHint>
void tile(const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups, const int8_t* ahead,
          int32_t* out, bool accumulate) {
  constexpr bool kTall = kRows > kRowsAtMost;
  configure_tile(kRows);
  strip<kTall, kPassing, kHint>(a, lda, b, groups, ahead, out, accumulate);
}

// Up to 16 rows of two panels: four chains of products, as two run at half the speed.
template <int kHint>
void strip_of_pair(int rows, const uint8_t* a, int64_t lda, const int8_t* b, int64_t apart,
                   int64_t groups, int64_t ahead, int32_t* out) {
  int32_t* right = out + rows * kPanel;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < groups * kGroup; k += kDepth, a += kDepth) {
    fetch_step<kHint>(b + ahead);
    fetch_step<kHint>(b + apart + ahead);
    multiply_pair_step(a, lda, b, apart);
    b += kDepth * kPanel;
  }
  _tile_stored(0, out, kSumStride);
  _tile_stored(1, out + kHalf, kSumStride);
  _tile_stored(2, right, kSumStride);
  _tile_stored(3, right + kHalf, kSumStride);
}

template <int kRows, int kHint>
void pair(const uint8_t* a, int64_t lda, const int8_t* b, int64_t apart, int64_t groups,
          int64_t ahead, int32_t* out) {
  configure_pair(kRows);
  strip_of_pair<kHint>(kRows, a, lda, b, apart, groups, ahead, out);
}

// tdpbssd in 4 independent chains.
int64_t multiply(int64_t rounds) {
  configure_tile(kTallest);
  _tile_zero(4);
  _tile_zero(6);
  for (int64_t n = 0; n < rounds; ++n) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 6);
    _tile_dpbssd(2, 4, 6);
    _tile_dpbssd(3, 4, 6);
  }
  release();
  return rounds * 4 * kRowsAtMost * kHalf * kDepth;
}

template <Passing kPassing, int kHint>
struct Tiles {
  TileFn tiles[kTallest];
  template <int... kLess>
  constexpr explicit Tiles(std::integer_sequence<int, kLess...>)
      : tiles{tile<kLess + 1, kPassing, kHint>...} {}
};

template <Passing kPassing, int kHint>
constexpr Tiles<kPassing, kHint> kTiles{std::make_integer_sequence<int, kTallest>()};

template <int kHint>
constexpr const TileFn* kFew = kTiles<Passing::kWeights, kHint>.tiles;

template <int kHint>
struct Pairs {
  PairFn pairs[kRowsAtMost];
  template <int... kLess>
  constexpr explicit Pairs(std::integer_sequence<int, kLess...>)
      : pairs{pair<kLess + 1, kHint>...} {}
};

template <int kHint>
constexpr Pairs<kHint> kPairs{std::make_integer_sequence<int, kRowsAtMost>()};

}  // namespace

const Kernels& kernels_amx() {
  const Kernels& avx512 = kernels_avx512vnni();
  static const Format format = {
      .name = "s8s8k64",
      .tile_rows = kTallest,
      .bytes_per_code = 1,
      .k_multiple = kDepth,
      .mul_offset = 0,
      .tiles = kTiles<Passing::kRows, kNothing>.tiles,
      .prefetching_tiles = kTiles<Passing::kRows, kT1>.tiles,
      .arrange = arrange_offset<0>,
      .release = release,
      .multiply = multiply,
      .few = {kTallest, {kFew<kT0>, kFew<kT1>, kFew<kNta>}},
      .pairs = {kRowsAtMost, {kPairs<kT0>.pairs, kPairs<kT1>.pairs, kPairs<kNta>.pairs}},
      .strips = &kStrips,
      .groups = &kGroups,
      .tuning = {.block_depth = 1024,
                 .block_rows = 256,
                 .block_bytes = 512 << 10,
                 .stream_rows = kTallest,
                 .streams = 2,
                 .minimum_rows = 3,
                 .far_bytes = 1 << 20,
                 .serial_steps = 1 << 21},
      .below = avx512.formats[0]};
  static const Kernels kernels = {"amx",         avx512.row,
                                  avx512.sums,   avx512.attention,
                                  avx512.lowbit, {&format, &format, &format, &format}};
  return kernels;
}

}  // namespace qfx::cpu
