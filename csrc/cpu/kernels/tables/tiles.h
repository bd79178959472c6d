// Products of integers: how an instruction set lays out rows of codes, and its tiles.
//
// A row of activations is quantized to codes q[k], then arranged into an operand format of the
// instruction set, together with integer constants of the row such that
//     sum_k (q[k] - z) w[n][k] = tile[n] + row_add - row_mul * colsum[n]      (wrapping int32)
// with row_add returned by arrange and row_mul = z + mul_offset.
//
// Files of an instruction set are compiled with its flags, so this header holds plain C types only:
// an inline function shared with other files could carry wide instructions into them.
#pragma once

#include <cstdint>

#include "cpu/kernels/tables/panel.h"
#include "cpu/kernels/tables/sums.h"
#include "cpu/kernels/tables/tuning.h"

namespace qfx::cpu {

inline constexpr int kMaxTileRows = 32;
inline constexpr int kMaxBytesPerCode = 2;

// tile[r][n] (+)= sum_k a[r][k] b[k][n] over `groups` groups of 4 k, n < 32. A prefetching tile
// fetches as many bytes from `ahead` on as it reads from b; they need not exist.
using TileFn = void (*)(const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups,
                        const int8_t* ahead, int32_t* tile, bool accumulate);

// The same for two panels, `apart` bytes from one another, and whole products: out[2][rows][32].
// Prefetches what lies `ahead` bytes from what it reads of each; it need not exist.
using PairFn = void (*)(const uint8_t* a, int64_t lda, const int8_t* b, int64_t apart,
                        int64_t groups, int64_t ahead, int32_t* out);

// Tiles whose sums are where their products left them, in registers: where they go, and what
// becomes of them then; rows = 0 where more of K follows. A tile alone is the first one.
struct Pending {
  int32_t* sums = nullptr;  // null: there are none
  EpilogueArgs then[2] = {};
};

// Multiplies `rows` rows as a TileFn does, but leaves the sums in registers; `sums`: what to add
// to, or null. Meanwhile it stores those of the tile before and finishes them. Prefetches
// `fetches` lines of 64 bytes from `ahead` on with every 64 k; they need not exist.
using StripFn = void (*)(int rows, const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups,
                         const int8_t* ahead, int64_t fetches, const int32_t* sums,
                         const Pending& before);

// The same for two panels, `apart` bytes from one another, and whole products of few rows; its sums
// are [2][rows][32]. Prefetches what lies `ahead` bytes from what it reads of each, with that hint.
using StripPairFn = void (*)(int rows, const uint8_t* a, int64_t lda, const int8_t* b,
                             int64_t apart, int64_t groups, int64_t ahead, int hint,
                             const Pending& before);

// Tiles of panels `apart` bytes from one another, which become scores of attention: as the score
// kernel makes them of tiles, of rows that see all keys.
struct ScoreArgs;
using ScoreTileFn = void (*)(const uint8_t* a, int64_t lda, const int8_t* b, int64_t apart,
                             int64_t groups, const ScoreArgs* args);

// What an instruction set has that multiplies and finishes at once. Tables of functions are by
// output_of.
struct Strips {
  // Of a block of strips, and of K: more than these. A shallow tile has no time to finish another.
  int least_rows, least_depth;
  const StripFn* rows_pass;     // for blocks of several strips
  const StripFn* weights_pass;  // for blocks of one
  const StripPairFn* pairs;     // up to least_rows rows
  void (*finish)(const Pending& last);
};

// Tiles of 1 to `rows` rows that fetch with each hint: a prefetch has it as an immediate operand,
// so these are for the few rows whose weights are streamed. None where rows is 0.
template <typename Fn>
struct ByHint {
  int rows = 0;
  const Fn* tiles[kHints] = {};
};

// What is known of the codes of a product. Narrow weights lie in [-64, 64], narrow activations in
// [-64, 63]: every product of 7 bits or fewer.
enum class Operands : int { kWide, kNarrowWeight, kNarrowCodes, kNarrow };
inline constexpr int kOperandKinds = 4;

// An operand format of activations and the tiles that read it.
struct Format {
  const char* name;     // bits of activations and weights that it is exact for: s8s8, s7s8, ...
  int tile_rows;        // the tallest tile
  int bytes_per_code;   // of an arranged row; 1: it is the codes plus mul_offset, may be in place
  int k_multiple;       // rows are padded to this with what adds nothing; divides kKMultiple
  int32_t mul_offset;   // see above
  const TileFn* tiles;  // tiles[r - 1] handles r rows
  const TileFn* prefetching_tiles;
  // The same, which fetch half as many bytes: two tiles of a block share what is to be fetched, so
  // that memory is read all the time. Null where there are none.
  const TileFn* half_prefetching_tiles = nullptr;
  // Tiles of panels whose right half is zero: they do not read it, and the sums there become 0, or
  // stay where products are accumulated. Null where there are none.
  const TileFn* narrow_tiles = nullptr;
  int32_t (*arrange)(const int8_t* q, int64_t k, int64_t padded_k, uint8_t* a);
  // What a thread calls after its last tile, to release what tiles set up. Null if nothing.
  void (*release)() = nullptr;
  // Multiply-accumulates of `rounds` rounds of the multiply instructions alone, from registers: the
  // ceiling that benchmarks quote. Null where there is none to speak of.
  int64_t (*multiply)(int64_t rounds) = nullptr;
  // Prefetching tiles and pairs of them for few rows.
  ByHint<TileFn> few = {};
  ByHint<PairFn> pairs = {};
  // The same and the epilogue at once; null where it has none.
  const Strips* strips = nullptr;
  // Those whose sums become floats group by group, of up to kLongestPaired codes; null where it has
  // none.
  const GroupTiles* groups = nullptr;
  // scores[r - 1] multiplies r rows without row constants; null where it has none.
  const ScoreTileFn* scores = nullptr;
  // Where nothing is known of the processor; gemm/tuning.h has what is in use.
  Tuning tuning = {};
  // What to use instead for fewer than tuning.minimum_rows rows, or null.
  const Format* below = nullptr;
};

}  // namespace qfx::cpu
