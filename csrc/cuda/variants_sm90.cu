#include <torch/headeronly/util/Exception.h>

#include <cstring>

#include "cuda/tensor_map.h"
#include "cuda/variants_sm90.cuh"

namespace qfx::cuda::sm90 {

template <class Sums>
using Launch = void (*)(const CUtensorMap& left, const CUtensorMap& right, const Problem& p,
                        const Sums& sums, const Output& out, int blocks, Stream stream);

#define QFX_DECLARE(name, Sums)                                                                   \
  void launch_##name(const CUtensorMap& left, const CUtensorMap& right, const Problem& p,         \
                     const Sums& sums, const Output& out, int blocks, Stream stream);
#define QFX_S8(name, ...) QFX_DECLARE(name, CodeSums)
#define QFX_B1(name, ...) QFX_DECLARE(name, SignSums)
#include "cuda/kernels_sm90.inc"
#undef QFX_S8
#undef QFX_B1
#undef QFX_DECLARE

namespace {

template <class Sums>
struct Variant {
  const char* name;
  Config config;
  Launch<Sums> launch;
};

#define QFX_ROW(name) {#name, k_##name, launch_##name},
#define QFX_NO_ROW(name)
constexpr Variant<CodeSums> kOfCodes[] = {
#define QFX_S8(name, ...) QFX_ROW(name)
#define QFX_B1(name, ...) QFX_NO_ROW(name)
#include "cuda/kernels_sm90.inc"
#undef QFX_S8
#undef QFX_B1
};
constexpr Variant<SignSums> kOfSigns[] = {
#define QFX_S8(name, ...) QFX_NO_ROW(name)
#define QFX_B1(name, ...) QFX_ROW(name)
#include "cuda/kernels_sm90.inc"
#undef QFX_S8
#undef QFX_B1
};
#undef QFX_ROW
#undef QFX_NO_ROW

int64_t tiles(const Config& c, const Sizes& s) {
  const int64_t left = c.swap ? s.n : s.m, right = c.swap ? s.m : s.n;
  return s.batch * ceil_div(left, c.left) * ceil_div(right, c.right);
}

Problem problem_of(const Config& c, const Sizes& s, int splits, int32_t* workspace) {
  Problem p = {};
  p.size = s;
  p.lefts = static_cast<int>(ceil_div(c.swap ? s.n : s.m, c.left));
  p.rights = static_cast<int>(ceil_div(c.swap ? s.m : s.n, c.right));
  p.steps = static_cast<int>(ceil_div(s.k_bytes, kTileBytes));
  p.splits = splits;
  p.items = static_cast<int>(tiles(c, s) * splits);
  p.sums = workspace;
  p.arrivals = workspace == nullptr ? nullptr : workspace + s.batch * s.m * s.n;
  STD_TORCH_CHECK(splits >= 1 && splits <= p.steps, "a product of ", p.steps, " steps of K in ",
                  splits, " parts");
  return p;
}

CUtensorMap map_of(const Rows& rows, int64_t count, const Sizes& s, int tile_rows) {
  const int64_t step = s.batch == 1 ? rows.pitch * count : rows.batch_step;
  return tile_map({rows.data, s.k_bytes, count, s.batch, rows.pitch, step}, tile_rows);
}

template <class Sums, size_t kCount>
void run_any(const Variant<Sums> (&variants)[kCount], const Choice& choice, const Sizes& s,
             const Rows& a, const Rows& w, const Sums& sums, const Output& out, int32_t* workspace,
             int multiprocessors, Stream stream) {
  for (const Variant<Sums>& v : variants) {
    if (choice.kernel != v.name) continue;
    const Config& c = v.config;
    const Problem p = problem_of(c, s, choice.splits, workspace);
    const CUtensorMap tokens = map_of(a, s.m, s, c.swap ? c.right : c.left);
    const CUtensorMap weights = map_of(w, s.n, s, c.swap ? c.left : c.right);
    const int blocks = std::min(p.items, multiprocessors);
    return v.launch(c.swap ? weights : tokens, c.swap ? tokens : weights, p, sums, out, blocks,
                    stream);
  }
  STD_TORCH_CHECK(false, "there is no Hopper kernel '", choice.kernel, "' for these operands");
}

}  // namespace

int64_t workspace_size(const Config& config, const Sizes& s, int splits) {
  if (splits == 1) return 0;
  return s.batch * s.m * s.n + tiles(config, s) * config.warpgroups * 4;
}

void run(const Choice& choice, const Sizes& size, const Rows& a, const Rows& w,
         const CodeSums& sums, const Output& out, int32_t* workspace, int multiprocessors,
         Stream stream) {
  run_any(kOfCodes, choice, size, a, w, sums, out, workspace, multiprocessors, stream);
}

void run(const Choice& choice, const Sizes& size, const Rows& a, const Rows& w,
         const SignSums& sums, const Output& out, int32_t* workspace, int multiprocessors,
         Stream stream) {
  run_any(kOfSigns, choice, size, a, w, sums, out, workspace, multiprocessors, stream);
}

}  // namespace qfx::cuda::sm90
