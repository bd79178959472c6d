// Channels of an image become codes, in vectors of 512 bits. (C5)
#pragma once

#include <immintrin.h>

#include "cpu/kernels/rows/range.h"
#include "cpu/kernels/tables/depthwise.h"

namespace qfx::cpu {
namespace {  // internal linkage: each instruction set compiles its own

static_assert(kLanes == 16, "a vector holds the lanes");

inline __mmask16 lanes_there(int lanes) {
  return static_cast<__mmask16>(lanes >= kLanes ? 0xffff : (1 << lanes) - 1);
}

inline void range_of_lanes(const PixelLanes* from, LaneExtremes* extremes) {
  const __mmask16 there = lanes_there(from->lanes);
  WideExtremes found, other;
  found.most = _mm512_loadu_si512(extremes->most);
  found.least = _mm512_loadu_si512(extremes->least);
  const float* x = from->x;
  const int64_t step = from->step;
  const auto bits = [&](const float* at) {
    return _mm512_castps_si512(_mm512_maskz_loadu_ps(there, at));
  };
  int64_t i = 0;
  for (; i + 2 <= from->count; i += 2, x += 2 * step) {
    found.include(bits(x));
    other.include(bits(x + step));
  }
  if (i < from->count) found.include(bits(x));
  _mm512_storeu_si512(extremes->most, _mm512_max_epi32(found.most, other.most));
  _mm512_storeu_si512(extremes->least, _mm512_max_epu32(found.least, other.least));
}

// Of 16 ranges, as code_of_range has it.
struct WideRanges {
  __m512i most, least;
  __m512 low, high;
  __mmask16 finite;

  explicit WideRanges(const LaneExtremes& of)
      : most(_mm512_loadu_si512(of.most)), least(_mm512_loadu_si512(of.least)) {
    const __mmask16 negative = _mm512_movepi32_mask(least);
    const __m512i positive = _mm512_maskz_and_epi32(negative, least, _mm512_set1_epi32(0x7fffffff));
    low = _mm512_castsi512_ps(_mm512_maskz_mov_epi32(negative, least));
    high = _mm512_castsi512_ps(most);
    size_ = _mm512_max_epi32(most, positive);
    finite = _mm512_cmplt_epi32_mask(size_, _mm512_set1_epi32(kInfiniteBits));
  }

  __m512 magnitude() const { return _mm512_castsi512_ps(size_); }

 private:
  __m512i size_;
};

inline void codes_of_lanes(const LaneExtremes* extremes, const CodeSpec* spec, LaneCodes* codes) {
  const WideRanges range(*extremes);
  const int most_code = (1 << (spec->bits - 1)) - 1;
  const int least_code = spec->symmetric ? -most_code : -most_code - 1;
  const __m512i qmax = _mm512_set1_epi32(most_code), qmin = _mm512_set1_epi32(least_code);
  const __m512 steps = _mm512_set1_ps(static_cast<float>(most_code - least_code));
  __m512 scale =
      spec->symmetric
          ? _mm512_div_ps(range.magnitude(), _mm512_set1_ps(static_cast<float>(most_code)))
          : _mm512_sub_ps(_mm512_div_ps(range.high, steps), _mm512_div_ps(range.low, steps));
  scale = _mm512_max_ps(_mm512_set1_ps(kSmallestScale), scale);
  const __m512 inverse = _mm512_maskz_div_ps(range.finite, _mm512_set1_ps(1.f), scale);
  const __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(range.low, inverse));
  const __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps(range.high, inverse));
  __m512i zero = _mm512_setzero_si512();
  if (!spec->symmetric) {
    zero = _mm512_maskz_sub_epi32(range.finite, qmin, low);
    zero = _mm512_min_epi32(_mm512_max_epi32(zero, qmin), qmax);
  }
  const __mmask16 within = _mm512_cmpge_epi32_mask(_mm512_add_epi32(low, zero), qmin) &
                           _mm512_cmple_epi32_mask(_mm512_add_epi32(high, zero), qmax);
  codes->clamped = (within & range.finite) != 0xffff;
  const __m512i offset = _mm512_set1_epi32(kLaneOffset);
  const auto from_offset = [&](__m512i q) {
    return _mm512_add_epi32(offset, _mm512_maskz_mov_epi32(range.finite, q));
  };
  _mm512_storeu_ps(codes->scale, _mm512_mask_blend_ps(range.finite, range.magnitude(), scale));
  _mm512_storeu_ps(codes->inverse, inverse);
  _mm512_storeu_si512(codes->zero, _mm512_add_epi32(zero, offset));
  _mm512_storeu_si512(codes->least, from_offset(qmin));
  _mm512_storeu_si512(codes->most, from_offset(qmax));
}

// Codes of pixels one after the other, of which each `every`-th quad is stored.
template <bool kClamped>
class WideQuads {
 public:
  WideQuads(const PixelLanes& from, const LaneCodes& codes, const QuadLine& to)
      : there_(lanes_there(from.lanes)),
        inverse_(_mm512_loadu_ps(codes.inverse)),
        zero_(_mm512_loadu_si512(codes.zero)),
        least_(_mm512_loadu_si512(codes.least)),
        most_(_mm512_loadu_si512(codes.most)),
        out_(to.out),
        every_(to.every) {}

  void add_zeros(int64_t count) {
    const __m512i code = code_of(_mm512_setzero_ps());
    for (int64_t i = 0; i < count; ++i) add(code);
  }

  void add(const float* x, int64_t step, int64_t count) {
    int64_t i = 0;
    for (; i < count && skipped_ != every_ - 1; ++i, x += step) add(code_at(x));
    if (every_ == 1) {
      for (; i < count; ++i, x += step) store(code_at(x));
    } else if (every_ == 2) {
      for (; i + 2 <= count; i += 2, x += 2 * step) {
        shift(code_at(x));
        store(code_at(x + step));
      }
    }
    for (; i < count; ++i, x += step) add(code_at(x));
  }

 private:
  __m512i code_at(const float* x) const { return code_of(_mm512_maskz_loadu_ps(there_, x)); }

  __m512i code_of(__m512 x) const {
    const __m512i q = _mm512_add_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(x, inverse_)), zero_);
    return kClamped ? _mm512_min_epi32(_mm512_max_epi32(q, least_), most_) : q;
  }

  // The lowest byte of `next` becomes the last one.
  void shift(__m512i next) {
    quad_ = _mm512_mask_shuffle_epi8(_mm512_srli_epi32(quad_, 8), kLastBytes, next, to_last_);
  }

  void store(__m512i next) {
    shift(next);
    _mm512_storeu_si512(out_, quad_);
    out_ += kQuadBytes;
  }

  void add(__m512i next) {
    shift(next);
    if (skipped_ > 0) return void(--skipped_);
    _mm512_storeu_si512(out_, quad_);
    out_ += kQuadBytes;
    skipped_ = every_ - 1;
  }

  static constexpr __mmask64 kLastBytes = 0x8888888888888888;

  const __mmask16 there_;
  const __m512 inverse_;
  const __m512i zero_, least_, most_;
  // Of each four bytes, the place of the first among its sixteen.
  const __m512i to_last_ = _mm512_broadcast_i32x4(_mm_set_epi32(12 << 24, 8 << 24, 4 << 24, 0));
  __m512i quad_ = _mm512_setzero_si512();
  uint8_t* out_;
  const int64_t every_;
  int64_t skipped_ = kQuadTaps - 1;
};

template <bool kClamped>
inline void quads_with_codes(const PixelLanes& from, const LaneCodes& codes, const QuadLine& to) {
  const int64_t pixels = (to.quads - 1) * to.every + kQuadTaps;
  const int64_t before = to.before < pixels ? to.before : pixels;
  const int64_t count = from.count < pixels - before ? from.count : pixels - before;
  WideQuads<kClamped> quads(from, codes, to);
  quads.add_zeros(before);
  quads.add(from.x, from.step, count);
  quads.add_zeros(pixels - before - count);
}

inline void quads_of_lanes(const PixelLanes* from, const LaneCodes* codes, const QuadLine* to) {
  if (codes->clamped) return quads_with_codes<true>(*from, *codes, *to);
  quads_with_codes<false>(*from, *codes, *to);
}

}  // namespace
}  // namespace qfx::cpu
