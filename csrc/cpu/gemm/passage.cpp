#include "cpu/gemm/passage.h"

#include <algorithm>

namespace qfx::cpu {
namespace {

constexpr int64_t kBlockMultiple = kKMultiple;  // of K, which every format's steps divide

// The tiles for the rows of a block from `m` on, which multiply `size` bytes of weights at b, and
// where those that prefetch begin: with what is next, or two of them with half of that each.
struct Fetching {
  const TileFn* tiles;
  const int8_t* ahead;
};

Fetching fetching_at(const Rows& rows, const Passage& how, int64_t m, const int8_t* b,
                     int64_t size) {
  const Format& format = *rows.format;
  const int8_t* ahead = b + (how.streams ? rows.tuning.ahead : size);
  const TileFn* halves = how.fetching > 0 ? format.half_prefetching_tiles : nullptr;
  if (halves != nullptr && m <= how.fetching) return {halves, m == 0 ? ahead : ahead + size / 2};
  return {m == how.fetching ? how.fetching_tiles : format.tiles, ahead};
}

}  // namespace

// The weights for one row may bypass the second cache, so that the keys and values of attention and
// what runs between two calls stay there. Weights for several rows are fetched into the caches.
int64_t hint_for(const Tuning& tuning, int64_t rows) {
  return tuning.hint == kNta && rows > 1 ? int64_t{kT0} : tuning.hint;
}

Passage passage_of(const Rows& rows, const PackedWeight& w, int64_t count) {
  const Format& format = *rows.format;
  const Tuning& tuning = rows.tuning;
  const int64_t depth = round_up(w.k, format.k_multiple);
  const int64_t height = tile_height(count, format.tile_rows);
  const bool streams = count <= tuning.stream_rows;
  const int64_t block = even_part(
      depth, streams ? std::max(depth, kBlockMultiple) : tuning.block_depth, kBlockMultiple);
  // The second tile of a block, as the first may wait for its own weights.
  const int64_t fetching = !streams && count > height ? height : 0;
  const bool by_hint = streams && count <= format.few.rows;
  const TileFn* tiles =
      by_hint ? format.few.tiles[hint_for(tuning, count)] : format.prefetching_tiles;
  return {depth, block, height, streams, fetching, tiles};
}

void run_panel(const Rows& rows, const PackedWeight& w, const RowBlock& block, int64_t p,
               int32_t* sums, const TileSink& sink) {
  Panel panel;
  sink.load_panel(p, &panel);
  const Passage how = passage_of(rows, w, block.rows());
  const bool narrow = !how.streams && w.n - p * kPanel <= kPanel / 2;
  const TileFn* narrow_tiles = narrow ? rows.format->narrow_tiles : nullptr;
  const bool whole = how.block >= how.depth;  // then all tiles have the same sums, which stay near
  for (int64_t k = 0; k == 0 || k < how.depth; k += how.block) {
    const int64_t groups = std::min(how.block, how.depth - k) / kGroup;
    const int8_t* b = w.panel(p) + k * kPanel;
    const bool last = k + how.block >= how.depth;
    for (int64_t m = block.begin; m < block.end; m += how.height) {
      const int height_here = static_cast<int>(std::min(how.height, block.end - m));
      const int64_t row = m - block.begin;
      auto [tiles, ahead] = fetching_at(rows, how, row, b, groups * kGroup * kPanel);
      if (narrow_tiles != nullptr) tiles = narrow_tiles;
      const uint8_t* a = rows.a + m * rows.stride + k * rows.format->bytes_per_code;
      int32_t* tile = whole ? sums : sums + row * kPanel;
      tiles[height_here - 1](a, rows.stride, b, groups, ahead, tile, k > 0);
      if (last) sink.tile(tile, m, height_here, p, panel);
    }
  }
}

void multiply_few(const Rows& rows, const PackedWeight& w, const RowBlock& block, int64_t p,
                  const Passage& how, int32_t* sums) {
  const int8_t* b = w.panel(p);
  how.fetching_tiles[block.rows() - 1](rows.a + block.begin * rows.stride, rows.stride, b,
                                       how.depth / kGroup, b + rows.tuning.ahead, sums, false);
}

void multiply_pair(const Rows& rows, const PackedWeight& w, const RowBlock& block, int64_t p,
                   int64_t q, int32_t* sums) {
  const Format& format = *rows.format;
  const int64_t count = block.rows();
  const int64_t groups = round_up(w.k, format.k_multiple) / kGroup;
  const PairFn* pairs = format.pairs.tiles[hint_for(rows.tuning, count)];
  pairs[count - 1](rows.a + block.begin * rows.stride, rows.stride, w.panel(p),
                   w.panel(q) - w.panel(p), groups, rows.tuning.ahead, sums);
}

}  // namespace qfx::cpu
