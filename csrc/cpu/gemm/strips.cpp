#include "cpu/gemm/strips.h"

#include <algorithm>

namespace qfx::cpu {
namespace {

// What a thread's last call left undone, and the columns that it and the next one need; where K is
// whole, the sums of both.
struct Unfinished {
  Pending last;
  Panel panels[2][2];
  alignas(64) int32_t sums[2][kMaxTileRows * kPanel];
  int turn = 0, strips = 0;
};

Unfinished& unfinished() {
  thread_local Unfinished state;
  return state;
}

// How many lines of the next panel's part to prefetch with every 64 k: where the weight stays in
// the second cache none, else so many that a block of strips spreads them evenly.
int64_t fetches_for(const StripProduct& of, const Passage& how, int64_t count) {
  constexpr int64_t kLine = 64;
  const int64_t steps = how.block / kKMultiple - 1, strips = (count + how.height - 1) / how.height;
  const bool near = of.w.panels() * how.depth * kPanel <= of.rows.tuning.near_bytes;
  if (near || strips * steps <= 0) return 0;
  const int64_t lines = how.block * kPanel / kLine;
  return (lines + strips * steps - 1) / (strips * steps);
}

// That of up to `most` rows from row m of them on, whose sums are these.
EpilogueArgs part_of(const EpilogueArgs& all, const int32_t* sums, int64_t m, int64_t most) {
  EpilogueArgs part = all;
  part.tile = sums;
  part.rows = static_cast<int>(std::clamp<int64_t>(all.rows - m, 0, most));
  if (part.rows == 0) return part;  // there may be nothing to finish at all
  part.row_add += m;
  part.row_mul += m;
  part.row_scale += m * all.scale_stride;
  part.out = static_cast<char*>(all.out) + m * all.ldo * (all.dtype == Dtype::kFloat32 ? 4 : 2);
  return part;
}

// What is the same for all panels of a block.
struct Run {
  const StripProduct& of;
  const RowBlock& block;
  Passage how;
  int64_t fetches;
  const StripFn* strips;  // by output_of
  int32_t* sums;          // of the block; or null where K is whole

  void panel(int64_t p, Unfinished& left) const;
};

void Run::panel(int64_t p, Unfinished& left) const {
  Panel& panel = left.panels[left.turn ^= 1][0];
  of.sink.load_panel(p, &panel);
  EpilogueArgs all;
  of.sink.epilogue_of(sums, block.begin, static_cast<int>(block.rows()), p, panel, &all);
  const StripFn strip = strips[output_of(all.activation, all.dtype)];
  const Rows& rows = of.rows;
  left.last.then[1].rows = 0;
  for (int64_t k = 0; k == 0 || k < how.depth; k += how.block) {
    const int64_t part = std::min(how.block, how.depth - k);
    const int8_t *b = of.w.panel(p) + k * kPanel, *ahead = b + part * kPanel;
    for (int64_t m = 0; m < block.rows(); m += how.height) {
      int32_t* tile = sums == nullptr ? left.sums[left.strips ^= 1] : sums + m * kPanel;
      const uint8_t* a = rows.a + (block.begin + m) * rows.stride + k * rows.format->bytes_per_code;
      strip(static_cast<int>(how.height), a, rows.stride, b, part / kGroup, ahead, fetches,
            k > 0 ? tile : nullptr, left.last);
      ahead += (part / kKMultiple - 1) * fetches * 64;
      left.last.sums = tile;
      left.last.then[0] = part_of(all, tile, m, k + how.block >= how.depth ? how.height : 0);
    }
  }
}

}  // namespace

const Strips* strips_for(const Rows& rows, const PackedWeight& w, const TileSink& sink) {
  EpilogueArgs probe;
  const Strips* strips = rows.format->strips;
  const bool deep = strips != nullptr && w.k > strips->least_depth;
  return deep && sink.epilogue_of(nullptr, 0, 0, 0, Panel{}, &probe) ? strips : nullptr;
}

void run_strips(const StripProduct& of, const RowBlock& block, int64_t p, int64_t end,
                int32_t* sums) {
  Unfinished& left = unfinished();
  const Passage how = passage_of(of.rows, of.w, block.rows());
  const bool alone = block.rows() <= how.height;
  const Run run = {of,
                   block,
                   how,
                   fetches_for(of, how, block.rows()),
                   alone ? of.strips.weights_pass : of.strips.rows_pass,
                   how.block >= how.depth ? nullptr : sums};
  for (; p < end; ++p) run.panel(p, left);
}

void run_strip_pair(const StripProduct& of, const RowBlock& block, int64_t p, int64_t q,
                    int32_t* sums) {
  Unfinished& left = unfinished();
  Panel* panels = left.panels[left.turn ^= 1];
  of.sink.load_panel(p, &panels[0]);
  of.sink.load_panel(q, &panels[1]);
  const int count = static_cast<int>(block.rows());
  EpilogueArgs then[2];
  of.sink.epilogue_of(sums, block.begin, count, p, panels[0], &then[0]);
  of.sink.epilogue_of(sums + count * kPanel, block.begin, count, q, panels[1], &then[1]);
  const int64_t groups = round_up(of.w.k, of.rows.format->k_multiple) / kGroup;
  of.strips.pairs[output_of(then[0].activation, then[0].dtype)](
      count, of.rows.a + block.begin * of.rows.stride, of.rows.stride, of.w.panel(p),
      of.w.panel(q) - of.w.panel(p), groups, of.rows.tuning.ahead,
      static_cast<int>(hint_for(of.rows.tuning, count)), left.last);
  left.last = {sums, {then[0], then[1]}};
}

void finish_strips(const Strips& strips) {
  Pending& last = unfinished().last;
  if (last.sums != nullptr) strips.finish(last);
  last = {};
}

}  // namespace qfx::cpu
