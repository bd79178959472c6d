// The two products of rows of queries and probabilities with the codes of a part, in the tiles of
// linears or, for a few rows, with the codes where they lie. (K3) (K5)
#include <algorithm>

#include "cpu/attention/cache_rows.h"

namespace qfx::cpu {
namespace {

constexpr int32_t kProbabilityZero = -128;  // the zero point of both bytes of a probability

// The tiles of `count` arranged rows with one panel: out[count][32].
void multiply(const Rows& rows, int64_t count, const int8_t* panel, int64_t depth, int32_t* out) {
  const Format& format = *rows.format;
  for (int64_t m = 0; m < count; m += format.tile_rows) {
    const int64_t height = std::min<int64_t>(format.tile_rows, count - m);
    format.tiles[height - 1](rows.a + m * rows.stride, rows.stride, panel, depth / kGroup, panel,
                             out + m * kPanel, false);
  }
}

}  // namespace

// The products of the bytes of the queries with a quad: tiles_[2][2 rows][32].
void CacheRows::multiply_keys(CacheCodes& codes, int64_t part, int64_t quad,
                              const CachePartCodes& here) {
  if (few_) {
    const CacheFewArgs args = {here.k_blocks + quad * kBlocksOfQuad,
                               kBlocksOfQuad,
                               a_.keys.bits,
                               a_.keys.d,
                               queries_.a,
                               kBytes * count_,
                               queries_.stride,
                               tiles_,
                               here.k_sums + quad * kQuad};
    return kernels_.attention->cache.few.keys(&args);
  }
  codes.unpack(part, quad);
  const int64_t depth = round_up(a_.keys.d, queries_.format->k_multiple);
  for (int64_t p = 0; p < kQuad / kPanel; ++p) {
    multiply(queries_, kBytes * count_, here.k + (quad * kQuad / kPanel + p) * codes.key_stride(),
             depth, tiles_ + p * kBytes * count_ * kPanel);
  }
}

void CacheRows::score(CacheCodes& codes, int64_t part, const Quads& quads,
                      const CachePartCodes& here) {
  std::fill_n(tops_, count_ * kPanel, kHiddenScore);
  for (int64_t quad = quads.first; quad < quads.end; ++quad) {
    const int64_t first = quad * kQuad;
    multiply_keys(codes, part, quad, here);
    const float* masks[kMaxTileRows];
    for (int64_t r = 0; r < count_; ++r) masks[r] = added(r, part * kQuadsOfPart + quad);
    const CacheScoreArgs args = {.raw = tiles_,
                                 .rows = count_,
                                 .panels = kQuad / kPanel,
                                 .add = queries_.add,
                                 .mul = words_ ? 0 : queries_.format->mul_offset,
                                 .colsum = here.k_sums + first,
                                 .row_scale = row_scale_,
                                 .key_scale = here.k_scale + first,
                                 .row_sum = row_sum_,
                                 .minimum = a_.keys.bits == 8 ? nullptr : here.k_minimum + first,
                                 .softcap = a_.softcap,
                                 .mask = masks,
                                 .out = scores_ + (quad - quads.first) * kQuad,
                                 .stride = kStride,
                                 .top = tops_};
    kernels_.attention->cache.score(&args);
  }
  kernels_.attention->greatest(tops_, count_, greatest_);
}

// The products of the bytes of the probabilities with the values: tiles_[Ep / 32][2 rows][32].
void CacheRows::multiply_values(const CacheCodes& of, const CachePartCodes& codes,
                                const Quads& quads) {
  const int64_t first = quads.first * kQuad, depth = quads.end * kQuad - first;
  if (few_) {
    const CacheFewArgs args = {codes.v_blocks + first / kTokens,
                               depth / kTokens,
                               a_.values.bits,
                               a_.values.d,
                               probabilities_.a,
                               kBytes * count_,
                               probabilities_.stride,
                               tiles_,
                               nullptr};
    return kernels_.attention->cache.few.values(&args);
  }
  for (int64_t p = 0; p < of.value_width() / kPanel; ++p) {
    multiply(probabilities_, kBytes * count_, codes.v + p * of.value_stride() + first * kPanel,
             depth, tiles_ + p * kBytes * count_ * kPanel);
  }
}

// Probabilities times values. (K5)
void CacheRows::mix(const CacheCodes& of, const CachePartCodes& codes, const Quads& quads,
                    float* y) {
  const int64_t width = of.value_width();
  const int32_t mul = words_ ? 0 : kProbabilityZero + probabilities_.format->mul_offset;
  multiply_values(of, codes, quads);
  std::fill_n(value_sums_, width, 0);
  for (int64_t p = 2 * quads.first; p < 2 * quads.end && mul != 0; ++p) {
    for (int64_t e = 0; e < width; ++e) value_sums_[e] += codes.v_sums[p * width + e];
  }
  for (int64_t e = 0; e < width; e += kPanel) {
    const int32_t* tile = tiles_ + e * kBytes * count_;
    const MixArgs args = {tile,
                          tile + count_ * kPanel,
                          count_,
                          probabilities_.add,
                          probabilities_.add + count_,
                          mul,
                          value_sums_ + e,
                          factor_,
                          y + e,
                          width};
    kernels_.attention->mix(&args);
  }
}

}  // namespace qfx::cpu
