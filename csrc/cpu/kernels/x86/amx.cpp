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

#include "cpu/kernels/rows/fetch.h"
#include "cpu/kernels/rows/offset.h"
#include "cpu/kernels/tables/kernels.h"
#include "cpu/kernels/x86/lines.h"

namespace qfx::cpu {
namespace {

constexpr int kRowsAtMost = 16;               // of one tile register
constexpr int kTallest = 2 * kRowsAtMost;     // rows of a tile
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

thread_local int configured = 0;  // rows, those of a pair negative; 0: released

void configure(int name, const int (&height)[8]) {
  Shapes shapes = {};
  shapes.palette = 1;
  for (int i = 0; i < 8; ++i) {
    shapes.rows[i] = static_cast<uint8_t>(height[i]);
    shapes.row_bytes[i] = height[i] == 0 ? 0 : kDepth;
  }
  asm volatile("" ::"r"(&shapes) : "memory");  // GCC's ldtilecfg claims to read 8 bytes only
  _tile_loadconfig(&shapes);
  configured = name;
}

// Registers 0, 1: sums of the upper rows, left and right columns; 2, 3: of the lower rows; 4, 5:
// activations of the upper and lower rows; 6, 7: weights of the left and right columns.
void configure_tile(int rows) {
  if (configured == rows) return;
  const int upper = rows < kRowsAtMost ? rows : kRowsAtMost, lower = rows - upper;
  configure(rows, {upper, upper, lower, lower, upper, lower, kRowsAtMost, kRowsAtMost});
}

// Registers 0 to 3: sums of 64 columns; 4: activations; 5, 6, 7: weights, in turn.
void configure_pair(int rows) {
  if (configured == -rows) return;
  configure(-rows, {rows, rows, rows, rows, rows, kRowsAtMost, kRowsAtMost, kRowsAtMost});
}

void release() {
  _tile_release();
  configured = 0;
}

// Asks for the 64 k of a panel at `ahead`.
template <int kHint>
inline void fetch_step(const int8_t* ahead) {
  if constexpr (kHint == kNothing) return;
#pragma GCC unroll 32
  for (int i = 0; i < kDepth * kPanel; i += 64) fetch<kHint>(ahead + i);
}

// One operand stays in the first cache from tile to tile, the other passes by and is left in the
// second one: else neither of them stays.
enum class Passing { kRows, kWeights };

// (a macro, as the register is an immediate operand)
#define QFX_LOAD(tile, from, stride, passes) \
  if constexpr (passes) {                    \
    _tile_stream_loadd(tile, from, stride);  \
  } else {                                   \
    _tile_loadd(tile, from, stride);         \
  }

// One load stands between two products: with all loads first the products wait at every step.
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
    QFX_LOAD(6, b, kStride, kPassing == Passing::kWeights)
    QFX_LOAD(4, a, lda, kPassing == Passing::kRows)
    _tile_dpbssd(0, 4, 6);
    QFX_LOAD(7, b + kStride / 2, kStride, kPassing == Passing::kWeights)
    _tile_dpbssd(1, 4, 7);
    if constexpr (kTall) {
      QFX_LOAD(5, a + kRowsAtMost * lda, lda, kPassing == Passing::kRows)
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
  }
  _tile_stored(0, out, kSumStride);
  _tile_stored(1, out + kHalf, kSumStride);
  if constexpr (kTall) _tile_stored(2, out + kLower, kSumStride);
  if constexpr (kTall) _tile_stored(3, out + kLower + kHalf, kSumStride);
}

template <int kRows, Passing kPassing, int kHint>
void tile(const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups, const int8_t* ahead,
          int32_t* out, bool accumulate) {
  constexpr bool kTall = kRows > kRowsAtMost;
  configure_tile(kRows);
  strip<kTall, kPassing, kHint>(a, lda, b, groups, ahead, out, accumulate);
}

// Register i begins anew: what the tile before left there is stored inside this one's first step,
// as a store waits for the last product of its own register only, and behind the last step for all.
#define QFX_BEGIN(i, place)                                                       \
  if (before.sums != nullptr) _tile_stored(i, before.sums + (place), kSumStride); \
  if (sums != nullptr) {                                                          \
    _tile_loadd(i, sums + (place), kSumStride);                                   \
  } else {                                                                        \
    _tile_zero(i);                                                                \
  }

template <bool kTall, Passing kPassing, Activation A>
void strip_behind(const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups,
                  const int8_t* ahead, int64_t fetches, const int32_t* sums,
                  const Pending& before) {
  const int64_t steps = groups * kGroup / kDepth;
  QFX_LOAD(6, b, kStride, kPassing == Passing::kWeights)
  QFX_LOAD(4, a, lda, kPassing == Passing::kRows)
  QFX_BEGIN(0, 0)
  _tile_dpbssd(0, 4, 6);
  QFX_LOAD(7, b + kStride / 2, kStride, kPassing == Passing::kWeights)
  QFX_BEGIN(1, kHalf)
  _tile_dpbssd(1, 4, 7);
  if constexpr (kTall) {
    QFX_LOAD(5, a + kRowsAtMost * lda, lda, kPassing == Passing::kRows)
    QFX_BEGIN(2, kLower)
    _tile_dpbssd(2, 5, 6);
    QFX_BEGIN(3, kLower + kHalf)
    _tile_dpbssd(3, 5, 7);
  }
  asm volatile("" ::: "memory");  // GCC's tilestored does not claim to write memory
  Lines<A> lines(before.then);
  const int64_t at_once = (before.then.rows + steps - 2) / (steps > 1 ? steps - 1 : 1);
  for (int64_t s = 1; s < steps; ++s) {
    a += kDepth;
    b += kDepth * kPanel;
    QFX_LOAD(6, b, kStride, kPassing == Passing::kWeights)
    QFX_LOAD(4, a, lda, kPassing == Passing::kRows)
    _tile_dpbssd(0, 4, 6);
    QFX_LOAD(7, b + kStride / 2, kStride, kPassing == Passing::kWeights)
    _tile_dpbssd(1, 4, 7);
    if constexpr (kTall) {
      QFX_LOAD(5, a + kRowsAtMost * lda, lda, kPassing == Passing::kRows)
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
    for (int64_t i = 0; i < at_once && lines.left() > 0; ++i) lines.line();
    for (int64_t i = 0; i < fetches; ++i, ahead += 64) fetch<kT1>(ahead);
  }
  while (lines.left() > 0) lines.line();
}

template <Passing kPassing, Activation A>
void strip_of(int rows, const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups,
              const int8_t* ahead, int64_t fetches, const int32_t* sums, const Pending& before) {
  configure_tile(rows);  // the rows of the tile before, if there is one
  const auto run =
      rows > kRowsAtMost ? strip_behind<true, kPassing, A> : strip_behind<false, kPassing, A>;
  run(a, lda, b, groups, ahead, fetches, sums, before);
}

void finish_strip(const Pending& last) {
  _tile_stored(0, last.sums, kSumStride);
  _tile_stored(1, last.sums + kHalf, kSumStride);
  if (configured > kRowsAtMost) {
    _tile_stored(2, last.sums + kLower, kSumStride);
    _tile_stored(3, last.sums + kLower + kHalf, kSumStride);
  }
  asm volatile("" ::: "memory");
  if (last.then.rows > 0) epilogue(&last.then);
}

template <Passing kPassing>
constexpr StripFn kStripOf[] = {
    strip_of<kPassing, Activation::kNone>, strip_of<kPassing, Activation::kRelu>,
    strip_of<kPassing, Activation::kGelu>, strip_of<kPassing, Activation::kGeluTanh>,
    strip_of<kPassing, Activation::kSilu>};

constexpr Strips kStrips = {kRowsAtMost, 2 * kDepth, kStripOf<Passing::kRows>,
                            kStripOf<Passing::kWeights>, finish_strip};

// Up to 16 rows of two panels: four chains of products, as two run at half the speed.
template <int kHint>
void strip_of_pair(int rows, const uint8_t* a, int64_t lda, const int8_t* b, int64_t apart,
                   int64_t groups, int64_t ahead, int32_t* out) {
  const int8_t* c = b + apart;
  int32_t* right = out + rows * kPanel;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < groups * kGroup; k += kDepth, a += kDepth) {
    fetch_step<kHint>(b + ahead);
    fetch_step<kHint>(c + ahead);
    _tile_loadd(4, a, lda);
    _tile_stream_loadd(5, b, kStride);
    _tile_dpbssd(0, 4, 5);
    _tile_stream_loadd(6, b + kStride / 2, kStride);
    _tile_dpbssd(1, 4, 6);
    _tile_stream_loadd(7, c, kStride);
    _tile_dpbssd(2, 4, 7);
    _tile_stream_loadd(5, c + kStride / 2, kStride);
    _tile_dpbssd(3, 4, 5);
    b += kDepth * kPanel;
    c += kDepth * kPanel;
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
      .tuning = {.block_depth = 1024,
                 .block_rows = 256,
                 .stream_rows = kTallest,
                 .streams = 2,
                 .minimum_rows = 3,
                 .serial_steps = 1 << 21},
      .below = avx512.formats[0]};
  static const Kernels kernels = {
      "amx", avx512.row, avx512.sums, avx512.attention, {&format, &format, &format, &format}};
  return kernels;
}

}  // namespace qfx::cpu
