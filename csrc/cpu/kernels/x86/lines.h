// Lines of a tile, its rows of 32 sums, which become outputs a few at a time between the products
// of the next tile. (E1)
#pragma once

#include "cpu/kernels/tables/tiles.h"
#include "cpu/kernels/x86/floats16.h"

namespace qfx::cpu {
namespace {

#define QFX_INLINE inline __attribute__((always_inline))

// 32 floats, rounded to nearest and even. One instruction does that, but takes denormal numbers for
// zeros.
QFX_INLINE __m512i bfloat16_of(Floats16 left, Floats16 right) {
#if defined(__AVX512BF16__)
  constexpr int kDenormal = 0x20;
  if (!(_mm512_fpclass_ps_mask(left.v, kDenormal) | _mm512_fpclass_ps_mask(right.v, kDenormal)))
      [[likely]] {
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(right.v, left.v));
  }
#endif
  const auto narrow = [](__m512 v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
  };
  return _mm512_inserti64x4(_mm512_castsi256_si512(narrow(left.v)), narrow(right.v), 1);
}

QFX_INLINE __m512i float16_of(Floats16 left, Floats16 right) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(left.v, kNearest)),
                            _mm512_cvtps_ph(right.v, kNearest), 1);
}

// The lines of one tile after those of another, a tile whose rows are 0 having none. What a line
// needs of its columns is kept in registers, as tiles leave few loads that cost nothing; for the
// same reason lines with an activation go two at a time, which share its constants. Rows have
// nothing to add, as the operand format is the codes themselves.
template <Activation A, Dtype D>
class Lines {
 public:
  explicit QFX_INLINE Lines(const EpilogueArgs (&tiles)[2]) : next_(&tiles[1]) { begin(tiles[0]); }

  QFX_INLINE bool left() const { return left_ > 0; }

  // So many calls of `some` finish this many lines.
  static QFX_INLINE int64_t calls_for(int64_t lines) { return (lines + kAtOnce - 1) / kAtOnce; }

  QFX_INLINE void some() {
    Floats16 y[kAtOnce][2];
    const int last = left_ < kAtOnce ? 0 : kAtOnce - 1;  // a line alone is made twice
#pragma GCC unroll 2
    for (int r = 0; r < kAtOnce; ++r) sums_of(r * last, y[r]);
#pragma GCC unroll 2
    for (int r = 0; r < kAtOnce; ++r) {
      y[r][0] = activate<A>(y[r][0]);
      y[r][1] = activate<A>(y[r][1]);
    }
#pragma GCC unroll 2
    for (int r = 0; r < kAtOnce; ++r) store(out_ + r * last * step_, y[r]);
    raw_ += kAtOnce * kPanel;
    mul_ += kAtOnce;
    scale_of_row_ += kAtOnce * scale_stride_;
    out_ += kAtOnce * step_;
    left_ -= kAtOnce;
    if (left_ <= 0 && next_ != nullptr) [[unlikely]]
      begin(*next_);
  }

 private:
  static constexpr int kAtOnce = A == Activation::kNone || A == Activation::kRelu ? 1 : 2;
  static constexpr int kHalf = kPanel / 2;

  QFX_INLINE void begin(const EpilogueArgs& e) {
    if (&e == next_) next_ = nullptr;
    left_ = e.rows;
    if (left_ == 0) return;
    raw_ = e.tile, mul_ = e.row_mul, scale_of_row_ = e.row_scale, scale_stride_ = e.scale_stride;
    out_ = static_cast<char*>(e.out), step_ = e.ldo * (D == Dtype::kFloat32 ? 4 : 2);
    past_caches_ = e.past_caches;
    columns_ = e.columns == kPanel ? ~0u : (1u << e.columns) - 1;
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      scale_[i] = _mm512_loadu_ps(e.panel->scale + kHalf * i);
      colsum_[i] = _mm512_loadu_si512(e.panel->colsum + kHalf * i);
      bias_[i] = e.panel->has_bias ? Floats16(_mm512_loadu_ps(e.panel->bias + kHalf * i))
                                   : Floats16(-0.f);  // changes nothing, not even -0
    }
  }

  QFX_INLINE void sums_of(int r, Floats16 (&y)[2]) const {
    const __m512i mul = _mm512_set1_epi32(mul_[r]);
    const Floats16 scale = scale_of_row_[r * scale_stride_];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const __m512i raw = _mm512_loadu_si512(raw_ + r * kPanel + kHalf * i);
      const __m512i sum = _mm512_sub_epi32(raw, _mm512_mullo_epi32(colsum_[i], mul));
      y[i] = Floats16(_mm512_cvtepi32_ps(sum)) * (scale_[i] * scale) + bias_[i];
    }
  }

  QFX_INLINE void store(char* out, const Floats16 (&y)[2]) const {
    if constexpr (D == Dtype::kFloat32) {
      if (past_caches_) {
        _mm512_stream_ps(reinterpret_cast<float*>(out), y[0].v);
        _mm512_stream_ps(reinterpret_cast<float*>(out) + kHalf, y[1].v);
        return;
      }
      _mm512_mask_storeu_ps(out, static_cast<__mmask16>(columns_), y[0].v);
      _mm512_mask_storeu_ps(out + 4 * kHalf, static_cast<__mmask16>(columns_ >> kHalf), y[1].v);
    } else {
      const __m512i halves =
          D == Dtype::kBFloat16 ? bfloat16_of(y[0], y[1]) : float16_of(y[0], y[1]);
      if (past_caches_) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(out), halves);
      } else {
        _mm512_mask_storeu_epi16(out, columns_, halves);
      }
    }
  }

  const EpilogueArgs* next_;
  const int32_t *raw_, *mul_;
  const float* scale_of_row_;
  int64_t scale_stride_;
  char* out_;
  int64_t step_;
  int left_;
  bool past_caches_;
  __mmask32 columns_;
  Floats16 scale_[2], bias_[2];
  __m512i colsum_[2];
};

#undef QFX_INLINE

}  // namespace
}  // namespace qfx::cpu
