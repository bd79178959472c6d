#include "cpu/attention/cache_rows.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "cpu/core/scratch.h"
#include "cpu/kernels/tables/code.h"

namespace qfx::cpu {
namespace {

constexpr float kHidden = -std::numeric_limits<float>::infinity();
constexpr int32_t kProbabilityZero = -128;       // the zero point of both bytes of a probability
constexpr int32_t kPlainOffset = 128;            // of codes that are these bytes
constexpr float kProbabilityMax = 4194303.f;     // 22 bits
constexpr float kQueryMax = 63 * 32768 + 16383;  // the greatest code of 22 bits
constexpr int64_t kLine = 16;  // floats: rows of scores shall not share cache sets
constexpr int64_t kQuads = kPart / kQuad;

// The tiles of `count` arranged rows with one panel: out[count][32].
void multiply(const Rows& rows, int64_t count, const int8_t* panel, int64_t depth, int32_t* out) {
  const Format& format = *rows.format;
  for (int64_t m = 0; m < count; m += format.tile_rows) {
    const int64_t height = std::min<int64_t>(format.tile_rows, count - m);
    format.tiles[height - 1](rows.a + m * rows.stride, rows.stride, panel, depth / kGroup, panel,
                             out + m * kPanel, false);
  }
}

// The bytes of `count` rows of k codes.
Rows rows_of(const Format& format, int64_t count, int64_t k, RowsMemory& memory) {
  PackedWeight w = {};
  w.k = k;
  return make_rows(format, kBytes * count, w, memory);
}

// Numbers 256 high + low + more of 16 bits, in whole pairs, from signed bytes.
void join_bytes(const uint8_t* high, const uint8_t* low, int more, int64_t count, uint8_t* out) {
  int16_t* to = reinterpret_cast<int16_t*>(out);
  for (int64_t i = 0; i < count; ++i) {
    const int byte = high == nullptr ? 0 : static_cast<int8_t>(high[i]);
    to[i] = static_cast<int16_t>(256 * byte + static_cast<int8_t>(low[i]) + more);
  }
  if (count % 2 != 0) to[count] = 0;
}

}  // namespace

CacheRows::CacheRows(const Kernels& kernels, const CacheAttention& attention, int64_t rows)
    : kernels_(kernels), a_(attention), quads_((attention.length + kQuad - 1) / kQuad) {
  thread_local RowsMemory query_memory, probability_memory;
  thread_local Scratch floats, integers, bytes;
  const CacheFewKernels& few = kernels.attention->cache.few;
  words_ = few.words;
  few_ = kBytes * rows <= few.rows && (!words_ || attention.keys.d <= kMostWords);
  words_ &= few_;
  const Format& format = format_for(kernels, Operands::kWide, few_ ? 1 : kBytes * rows);
  rows_ = std::min<int64_t>(std::max<int64_t>(rows, 1), format.tile_rows);
  const int64_t d = a_.keys.d, width = round_up(std::max(d, a_.values.d), kPanel);
  const int64_t bytes_of = words_ ? sizeof(int16_t) : 1;
  queries_ = rows_of(format, rows_, bytes_of * round_up(d, 2), query_memory);
  probabilities_ = rows_of(format, rows_, bytes_of * kPart, probability_memory);
  const bool masked = a_.mask.kind != Mask::Kind::kNone;
  const int64_t masks = masked ? rows_ * quads_ * kQuad : kQuad;
  scores_ = floats.get<float>(rows_ * (kPart + kLine + kPanel) + width + masks);
  tops_ = scores_ + rows_ * (kPart + kLine);
  query_floats_ = tops_ + rows_ * kPanel;
  masks_ = query_floats_ + width;
  const int64_t tiles = kBytes * rows_ * std::max<int64_t>(2 * kPanel, width);
  tiles_ = integers.get<int32_t>(tiles + width);
  value_sums_ = tiles_ + tiles;
  codes_ = bytes.get<uint8_t>(kBytes * std::max<int64_t>(width, kPart) + (rows_ + 1) * quads_);
  seen_ = codes_ + kBytes * std::max<int64_t>(width, kPart);
  kinds_ = reinterpret_cast<QuadMask*>(seen_ + quads_);
  std::fill_n(loaded_, kMaxTileRows, nullptr);
  std::fill_n(seen_, quads_, uint8_t{1});
  if (masked) return;
  // Of the last quad, where it has no more tokens.
  std::fill_n(masks_, kQuad, kHidden);
  std::fill_n(masks_, a_.length - (quads_ - 1) * kQuad, 0.f);
}

CacheRows::~CacheRows() { release(*queries_.format); }

// Consecutive rows are heads of one token, whose masks mostly are one.
CacheRows::Query CacheRows::query(int64_t r) const {
  const int64_t of_group = first_ + r;
  return {head_ / a_.keys.heads, head_ % a_.keys.heads * a_.group + of_group % a_.group,
          of_group / a_.group};
}

void CacheRows::load(int64_t i, int64_t first, int64_t count) {
  head_ = i, first_ = first, count_ = count;
  for (int64_t r = 0; r < count; ++r) quantize(r);
  if (a_.mask.kind != Mask::Kind::kNone) look();
}

// (K3): the bytes of R q as rows r, count + r, 2 count + r.
void CacheRows::quantize(int64_t r) {
  const Query at = query(r);
  const int64_t d = a_.keys.d;
  const Range range = rotated(kernels_, a_.q.at(at.b, at.h, at.t), a_.q.dtype, d, query_floats_);
  const bool finite = range.magnitude < kInfiniteBits;
  const float magnitude = std::bit_cast<float>(range.magnitude);
  const float scale = finite ? at_least(magnitude / kQueryMax, kSmallestScale) : magnitude;
  if (!finite) std::fill_n(query_floats_, d, 0.f);
  CacheQueryArgs args = {.q = query_floats_, .features = d, .inverse = 1.f / scale};
  args.offset = bytes_for(queries_, r, d, args.bytes) ? queries_.format->mul_offset : 0;
  const int32_t sum = kernels_.attention->cache.query(&args);
  row_scale_[r] = scale * a_.scale;
  row_sum_[r] = static_cast<float>(sum) * row_scale_[r];
  arrange(queries_, r, d, 0, args.bytes);
}

// Where the bytes of row r are to be written: whether that is where products read them.
bool CacheRows::bytes_for(const Rows& rows, int64_t r, int64_t count, uint8_t** bytes) const {
  const bool plain = rows.format->bytes_per_code == 1 && !words_;
  for (int i = 0; i < kBytes; ++i) {
    bytes[i] = plain ? rows.a + (i * count_ + r) * rows.stride : codes_ + i * count;
  }
  return plain;
}

// Makes operands of them; words: the last two are signed bytes of a number that is `less`.
void CacheRows::arrange(const Rows& rows, int64_t r, int64_t count, int less,
                        uint8_t* const* bytes) {
  const Format& format = *rows.format;
  const int64_t depth = round_up(count, format.k_multiple);
  const auto row = [&](int64_t i) { return rows.a + (i * count_ + r) * rows.stride; };
  for (int i = 0; i < kBytes; ++i) rows.add[i * count_ + r] = 0;
  if (words_) {
    join_bytes(nullptr, bytes[0], less, count, row(0));
    return join_bytes(bytes[1], bytes[2], less, count, row(1));
  }
  for (int i = 0; i < kBytes; ++i) {
    if (format.bytes_per_code == 1) {
      std::fill_n(row(i) + count, depth - count, uint8_t{0});
    } else {
      const int8_t* codes = reinterpret_cast<const int8_t*>(bytes[i]);
      rows.add[i * count_ + r] = format.arrange(codes, count, depth, row(i));
    }
  }
}

void CacheRows::attend(CacheCodes& codes, int64_t part, const CachePartial& out) {
  const Quads quads = seen_in(part);
  if (quads.first == quads.end) {
    std::fill_n(out.sums, count_, CacheSums{});
    return;
  }
  const CachePartCodes& here = codes.located(part, quads.first, quads.end);
  score(codes, part, quads, here);
  softmax(here, quads, out);
  mix(codes, here, quads, out.y);
}

// The products of the bytes of the queries with a quad: tiles_[2][3 rows][32].
void CacheRows::multiply_keys(CacheCodes& codes, int64_t part, int64_t quad,
                              const CachePartCodes& here) {
  constexpr int64_t kBlocks = kQuad / kTokens;
  if (few_) {
    const CacheFewArgs args = {here.k_blocks + quad * kBlocks,
                               kBlocks,
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
  std::fill_n(tops_, count_ * kPanel, kHidden);
  for (int64_t quad = quads.first; quad < quads.end; ++quad) {
    const int64_t first = quad * kQuad;
    multiply_keys(codes, part, quad, here);
    const float* masks[kMaxTileRows];
    for (int64_t r = 0; r < count_; ++r) masks[r] = added(r, part * kQuads + quad);
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
                                 .stride = kPart + kLine,
                                 .top = tops_};
    kernels_.attention->cache.score(&args);
  }
  kernels_.attention->greatest(tops_, count_, greatest_);
}

// Scores -> the bytes of each row's probabilities, arranged. (K4)
void CacheRows::softmax(const CachePartCodes& codes, const Quads& quads, const CachePartial& out) {
  const int64_t first = quads.first * kQuad, width = quads.end * kQuad - first;
  for (int64_t r = 0; r < count_; ++r) {
    float* scores = scores_ + r * (kPart + kLine);
    const SoftmaxArgs args = {scores,
                              width,
                              width,
                              greatest_[r],
                              codes.v_scale + first,
                              a_.values.bits == 8 ? nullptr : codes.v_minimum + first};
    const SoftmaxSums sums = kernels_.attention->softmax(&args);
    out.sums[r] = {greatest_[r] == kHidden ? 0.f : greatest_[r], sums.sum, sums.minimums};
    factor_[r] = sums.top / kProbabilityMax;
    CacheBytesArgs bytes = {.u = scores, .width = width, .factor = kProbabilityMax / sums.top};
    const bool plain = bytes_for(probabilities_, r, width, bytes.bytes);
    const int32_t offset = plain ? probabilities_.format->mul_offset : 0;
    bytes.offset = static_cast<uint8_t>(offset - kPlainOffset);
    kernels_.attention->cache.bytes(&bytes);
    arrange(probabilities_, r, width, kPlainOffset, bytes.bytes);
  }
}

// The products of the bytes of the probabilities with the values: tiles_[Ep / 32][3 rows][32].
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
    const CacheMixArgs args = {tile,  count_, probabilities_.add, mul, value_sums_ + e, factor_,
                               y + e, width};
    kernels_.attention->cache.mix(&args);
  }
}

void CacheRows::store(const CachePartial& all) const {
  const int64_t e = a_.values.d, width = round_up(e, kPanel), heads = a_.keys.heads * a_.group;
  const int64_t element = a_.dtype == Dtype::kFloat32 ? 4 : 2;
  for (int64_t r = 0; r < count_; ++r) {
    const Query at = query(r);
    float* y = all.y + r * width;
    const float inverse = all.sums[r].sum == 0.f ? 0.f : 1.f / all.sums[r].sum;
    for (int64_t i = 0; i < e; ++i) y[i] = y[i] * inverse;
    const int64_t to = ((at.b * heads + at.h) * a_.q.tokens + at.t) * e;
    const FinishArgs finish = {
        y, width, 1, e, cache_rotation_of(e), a_.dtype, a_.out + to * element};
    kernels_.attention->finish_rows(&finish);
  }
}

}  // namespace qfx::cpu
