// AMX-INT8: tdpbssd multiplies tiles of 16 rows x 64 k and 64 k x 16 columns, s8 x s8 summed in 32
// bits. Operand format: the codes themselves, zero padded. The packed layout is that of its
// weights.
//
// The shapes of the tile registers are state of the thread. Loading them takes as long as several
// products, so tiles do it only where the height differs from the last one's; they are released
// behind a thread's last tile (Format::release), since other users of the thread (oneDNN, say) set
// their own, and while tiles are in use every switch of threads saves 8 KB of them.
#include <immintrin.h>

#include <utility>

#include "cpu/kernels/rows/offset.h"
#include "cpu/kernels/tables/kernels.h"

namespace qfx::cpu {
namespace {

constexpr int kRowsAtMost = 16;               // of one tile register
constexpr int kDepth = 64;                    // codes of one row in it
constexpr int64_t kStride = kPanel * kGroup;  // bytes from one group of weights to the next
constexpr int64_t kSumStride = kPanel * 4;    // and from one row of sums to the next
constexpr int kHalf = kPanel / 2;             // columns of one tile register
constexpr int kLower = kRowsAtMost * kPanel;  // from the sums of the upper rows to the lower ones

// What ldtilecfg reads.
struct alignas(64) Shapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(Shapes) == 64);

thread_local int configured_rows = 0;  // 0: released

// Registers 0, 1: sums of the upper rows, left and right columns; 2, 3: of the lower rows; 4, 5:
// activations of the upper and lower rows; 6, 7: weights of the left and right columns.
void configure(int rows) {
  if (configured_rows == rows) return;
  const int upper = rows < kRowsAtMost ? rows : kRowsAtMost, lower = rows - upper;
  const int height[8] = {upper, upper, lower, lower, upper, lower, kRowsAtMost, kRowsAtMost};
  Shapes shapes = {};
  shapes.palette = 1;
  for (int i = 0; i < 8; ++i) {
    shapes.rows[i] = static_cast<uint8_t>(height[i]);
    shapes.row_bytes[i] = height[i] == 0 ? 0 : kDepth;
  }
  asm volatile("" ::"r"(&shapes) : "memory");  // GCC's ldtilecfg claims to read 8 bytes only
  _tile_loadconfig(&shapes);
  configured_rows = rows;
}

void release() {
  _tile_release();
  configured_rows = 0;
}

// GCC's tileloadd does not claim to read memory, so nothing here may write what it reads.
template <bool kTall, bool kPrefetch>
void strip(int rows, const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups,
           const int8_t* ahead, int32_t* out, bool accumulate) {
  configure(rows);
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
    if constexpr (kPrefetch) {
#pragma GCC unroll 32
      for (int i = 0; i < kDepth * kPanel; i += 64) __builtin_prefetch(ahead + i);
      ahead += kDepth * kPanel;
    }
    _tile_loadd(6, b, kStride);
    _tile_loadd(7, b + kStride / 2, kStride);
    _tile_loadd(4, a, lda);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    if constexpr (kTall) {
      _tile_loadd(5, a + kRowsAtMost * lda, lda);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
  }
  _tile_stored(0, out, kSumStride);
  _tile_stored(1, out + kHalf, kSumStride);
  if constexpr (kTall) _tile_stored(2, out + kLower, kSumStride);
  if constexpr (kTall) _tile_stored(3, out + kLower + kHalf, kSumStride);
}

template <int kRows, bool kPrefetch>
void tile(const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups, const int8_t* ahead,
          int32_t* out, bool accumulate) {
  constexpr bool kTall = kRows > kRowsAtMost;
  strip<kTall, kPrefetch>(kRows, a, lda, b, groups, ahead, out, accumulate);
}

// tdpbssd in 4 independent chains.
int64_t multiply(int64_t rounds) {
  configure(2 * kRowsAtMost);
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

template <bool kPrefetch>
struct Tiles {
  TileFn tiles[2 * kRowsAtMost];
  template <int... kRow>
  constexpr explicit Tiles(std::integer_sequence<int, kRow...>)
      : tiles{tile<kRow + 1, kPrefetch>...} {}
};

template <bool kPrefetch>
constexpr Tiles<kPrefetch> kTiles{std::make_integer_sequence<int, 2 * kRowsAtMost>()};

}  // namespace

const Kernels& kernels_amx() {
  const Kernels& avx512 = kernels_avx512vnni();
  static const Format format = {.name = "s8s8k64",
                                .tile_rows = 2 * kRowsAtMost,
                                .bytes_per_code = 1,
                                .k_multiple = kDepth,
                                .mul_offset = 0,
                                .tiles = kTiles<false>.tiles,
                                .prefetching_tiles = kTiles<true>.tiles,
                                .arrange = arrange_offset<0>,
                                .release = release,
                                .multiply = multiply,
                                .minimum_rows = avx512.formats[0]->tile_rows + 1,
                                .below = avx512.formats[0]};
  static const Kernels kernels = {
      "amx", avx512.row, avx512.sums, avx512.attention, {&format, &format, &format, &format}};
  return kernels;
}

}  // namespace qfx::cpu
