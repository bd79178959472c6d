#include "cuda/sm90/multiply.h"

#include <torch/headeronly/util/Exception.h>

#include <algorithm>

#include "cuda/sm90/launch.h"
#include "cuda/sm90/tensor_map.h"

namespace qfx::cuda::sm90 {
namespace {

// Counters of what the warps of a choice's tiles have added, after the sums.
int64_t counters(const Candidate& c, const Sizes& s) {
  return tile_count(c.config, s) * c.config.warpgroups * 4;
}

Problem problem_of(const Candidate& c, const Sizes& s, int splits, int32_t* parts) {
  const int64_t steps = ceil_div(s.k_bytes, kTileBytes);
  STD_TORCH_CHECK(splits >= 1 && splits <= steps, c.name, ": ", steps, " steps of K in ", splits,
                  " parts");
  const TileGrid grid = grid_of(c.config, s);
  Problem p = {s,
               static_cast<int>(grid.down),
               static_cast<int>(grid.across),
               static_cast<int>(steps),
               splits,
               static_cast<int>(tile_count(c.config, s) * splits),
               nullptr,
               nullptr};
  if (splits == 1) return p;
  p.sums = parts;
  p.arrivals = parts + s.batch * s.m * s.n;
  return p;
}

CUtensorMap map_of(const Rows& rows, int64_t count, const Sizes& s, int tile_rows) {
  const int64_t step = s.batch == 1 ? rows.pitch * count : rows.batch_step;
  return tile_map({rows.data, s.k_bytes, count, s.batch, rows.pitch, step}, tile_rows);
}

Launch launch_of(const Choice& choice, const Sizes& s, const Rows& a, const Rows& w,
                 const Output& out, int32_t* parts, int multiprocessors, Stream stream) {
  const Candidate& c = candidate(choice.kernel);
  const Config& config = c.config;
  const Problem p = problem_of(c, s, choice.splits, parts);
  const int right = config.right / config.cluster;  // rows that a block loads at once
  const CUtensorMap of_a = map_of(a, s.m, s, config.swap ? right : config.left);
  const CUtensorMap of_w = map_of(w, s.n, s, config.swap ? config.left : right);
  const int clusters = multiprocessors / config.cluster;
  return {config.swap ? of_w : of_a,
          config.swap ? of_a : of_w,
          p,
          out,
          std::min(p.items, std::max(clusters, 1) * config.cluster),
          stream};
}

bool follow_each_other(const Rows& rows, int64_t count) {
  return rows.batch_step % rows.pitch == 0 && rows.batch_step >= rows.pitch * count;
}

}  // namespace

bool can_read(const Sizes& s, const Rows& a, const Rows& w) {
  return s.batch == 1 || (follow_each_other(a, s.m) && follow_each_other(w, s.n));
}

int64_t part_values(const Sizes& s, const Choice& choice) {
  return choice.splits == 1 ? 0 : s.batch * s.m * s.n + counters(candidate(choice.kernel), s);
}

#define QFX_ROW(name) \
  if (choice.kernel == #name) return launch_##name(l, terms);
#define QFX_NO_ROW(name)

void multiply_codes(const Sizes& size, const Rows& a, const Rows& w, const CodeTerms& terms,
                    const Output& out, const Choice& choice, int32_t* parts, int multiprocessors,
                    Stream stream) {
  const Launch l = launch_of(choice, size, a, w, out, parts, multiprocessors, stream);
#define QFX_S8(name, ...) QFX_ROW(name)
#define QFX_B1(name, ...) QFX_NO_ROW(name)
#include "cuda/sm90/kernels.inc"
#undef QFX_S8
#undef QFX_B1
  STD_TORCH_CHECK(false, choice.kernel, " is no kernel for codes");
}

void multiply_signs(const Sizes& size, const Rows& a, const Rows& w, const SignTerms& terms,
                    const Output& out, const Choice& choice, int32_t* parts, int multiprocessors,
                    Stream stream) {
  const Launch l = launch_of(choice, size, a, w, out, parts, multiprocessors, stream);
#define QFX_S8(name, ...) QFX_NO_ROW(name)
#define QFX_B1(name, ...) QFX_ROW(name)
#include "cuda/sm90/kernels.inc"
#undef QFX_S8
#undef QFX_B1
  STD_TORCH_CHECK(false, choice.kernel, " is no kernel for signs");
}

}  // namespace qfx::cuda::sm90
