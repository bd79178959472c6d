#include "cpu/attention/cache_rows.h"

#include <algorithm>
#include <bit>

#include "cpu/core/scratch.h"
#include "cpu/kernels/tables/code.h"

namespace qfx::cpu {
namespace {

constexpr int32_t kPlainOffset = 128;           // of codes that are a probability's bytes
constexpr float kProbabilityMax = 65535.f;      // 16 bits
constexpr float kQueryMax = 127 * 256 + 127.f;  // whose bytes are the greatest signed ones

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
    to[i] = static_cast<int16_t>(256 * static_cast<int8_t>(high[i]) + static_cast<int8_t>(low[i]) +
                                 more);
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
  few_ = kBytes * rows <= few.rows && (!words_ || std::max(a_.keys.d, a_.values.d) <= kMostWords);
  words_ &= few_;
  const Format& format = format_for(kernels, Operands::kWide, few_ ? 1 : kBytes * rows);
  rows_ = std::min<int64_t>(std::max<int64_t>(rows, 1), format.tile_rows);
  const int64_t d = a_.keys.d, width = round_up(std::max(d, a_.values.d), kPanel);
  const int64_t bytes_of = words_ ? sizeof(int16_t) : 1;
  queries_ = rows_of(format, rows_, bytes_of * round_up(d, 2), query_memory);
  probabilities_ = rows_of(format, rows_, bytes_of * kPart, probability_memory);
  const bool masked = a_.mask.kind != Mask::Kind::kNone;
  const int64_t masks = masked ? rows_ * quads_ * kQuad : kQuad;
  scores_ = floats.get<float>(rows_ * (kStride + kPanel) + width + masks);
  tops_ = scores_ + rows_ * kStride;
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
  std::fill_n(masks_, kQuad, kHiddenScore);
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

// (K3): the bytes of R q as rows r, count + r.
void CacheRows::quantize(int64_t r) {
  const Query at = query(r);
  const int64_t d = a_.keys.d;
  const Range range = rotated(kernels_, a_.q.at(at.b, at.h, at.t), a_.q.dtype, d, query_floats_);
  const bool finite = range.magnitude < kInfiniteBits;
  const float magnitude = std::bit_cast<float>(range.magnitude);
  const float scale = finite ? at_least(magnitude / kQueryMax, kSmallestScale) : magnitude;
  if (!finite) std::fill_n(query_floats_, d, 0.f);
  CacheQueryArgs args = {};
  args.q = query_floats_;
  args.features = d;
  args.inverse = finite ? 1.f / scale : 0.f;
  const bool plain = bytes_for(queries_, r, d, &args.high, &args.low);
  args.offset = plain ? queries_.format->mul_offset : 0;
  const int32_t sum = kernels_.attention->cache.query(&args);
  row_scale_[r] = scale * a_.scale;
  row_sum_[r] = static_cast<float>(sum) * row_scale_[r];
  arrange(queries_, r, d, 0, args.high, args.low);
}

// Where the bytes of row r are to be written: whether that is where products read them.
bool CacheRows::bytes_for(const Rows& rows, int64_t r, int64_t count, uint8_t** high,
                          uint8_t** low) const {
  const bool plain = rows.format->bytes_per_code == 1 && !words_;
  *high = plain ? rows.a + r * rows.stride : codes_;
  *low = plain ? rows.a + (count_ + r) * rows.stride : codes_ + count;
  return plain;
}

// Makes operands of them; words: both are signed bytes of a number that is `less`.
void CacheRows::arrange(const Rows& rows, int64_t r, int64_t count, int less, uint8_t* high,
                        uint8_t* low) {
  const Format& format = *rows.format;
  const int64_t depth = round_up(count, format.k_multiple);
  const auto put = [&](int64_t row, uint8_t* bytes) {
    uint8_t* to = rows.a + row * rows.stride;
    const bool plain = format.bytes_per_code == 1;
    if (plain) std::fill_n(to + count, depth - count, uint8_t{0});
    const int8_t* codes = reinterpret_cast<const int8_t*>(bytes);
    rows.add[row] = plain ? 0 : format.arrange(codes, count, depth, to);
  };
  if (!words_) return put(r, high), put(count_ + r, low);
  rows.add[r] = rows.add[count_ + r] = 0;
  join_bytes(high, low, less, count, rows.a + r * rows.stride);
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

// Scores -> the bytes of each row's probabilities, arranged. (K4)
void CacheRows::softmax(const CachePartCodes& codes, const Quads& quads, const CachePartial& out) {
  const int64_t first = quads.first * kQuad, width = quads.end * kQuad - first;
  for (int64_t r = 0; r < count_; ++r) {
    float* scores = scores_ + r * kStride;
    const SoftmaxArgs args = {scores,
                              width,
                              width,
                              greatest_[r],
                              codes.v_scale + first,
                              a_.values.bits == 8 ? nullptr : codes.v_minimum + first};
    const SoftmaxSums sums = kernels_.attention->softmax(&args);
    out.sums[r] = {greatest_[r] == kHiddenScore ? 0.f : greatest_[r], sums.sum, sums.minimums};
    factor_[r] = sums.top / kProbabilityMax;
    uint8_t *high, *low;
    const bool plain = bytes_for(probabilities_, r, width, &high, &low);
    const int32_t offset = plain ? probabilities_.format->mul_offset : 0;
    kernels_.attention->probabilities(scores, width, kProbabilityMax / sums.top,
                                      static_cast<uint8_t>(offset - kPlainOffset), high, low);
    arrange(probabilities_, r, width, kPlainOffset, high, low);
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
    const int64_t to = a_.heads_last ? (at.b * a_.q.tokens + at.t) * heads + at.h
                                     : (at.b * heads + at.h) * a_.q.tokens + at.t;
    const FinishArgs finish = {
        y, width, 1, e, cache_rotation_of(e), a_.dtype, a_.out + to * e * element};
    kernels_.attention->finish_rows(&finish);
  }
}

}  // namespace qfx::cpu
