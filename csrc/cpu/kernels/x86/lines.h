// Lines of a tile, its rows of 32 sums, which become outputs a few at a time between the products
// of the next tile. (E1)
#pragma once

#include "cpu/kernels/tables/tiles.h"
#include "cpu/kernels/x86/store_line.h"

namespace qfx::cpu {
namespace {

#define QFX_INLINE inline __attribute__((always_inline))

// The lines of kTiles tiles one after the other, a tile whose rows are 0 having none. What a line
// needs of its columns is kept in registers, as tiles leave few loads that cost nothing; for the
// same reason lines with an activation go two at a time, which share its constants. kOffset: the
// operand format adds an offset to codes; without one rows have nothing to add, and those of a
// symmetric code nothing to take off. kResidual: whether there may be one.
template <Activation A, Dtype D, int kTiles, bool kOffset, bool kResidual = false>
class Lines {
 public:
  explicit QFX_INLINE Lines(const EpilogueArgs* tiles) : next_(tiles + 1) { begin(tiles[0]); }

  QFX_INLINE bool left() const { return left_ > 0; }

  // So many calls of `some` finish this many lines.
  static QFX_INLINE int64_t calls_for(int64_t lines) { return (lines + kAtOnce - 1) / kAtOnce; }

  QFX_INLINE void some() {
    Floats16 y[kAtOnce][2];
    const int last = left_ < kAtOnce ? 0 : kAtOnce - 1;  // a line alone is made twice
#pragma GCC unroll 2
    for (int r = 0; r < kAtOnce; ++r) sums_of(r * last, y[r]);
    if constexpr (kResidual) {
      if (residual_ != nullptr) add_residual(last, y);
    }
#pragma GCC unroll 2
    for (int r = 0; r < kAtOnce; ++r) {
      y[r][0] = activate<A>(y[r][0]);
      y[r][1] = activate<A>(y[r][1]);
    }
#pragma GCC unroll 2
    for (int r = 0; r < kAtOnce; ++r)
      store_line<D>(y[r], columns_, past_caches_, out_ + r * last * step_);
    raw_ += kAtOnce * kPanel;
    mul_ += kAtOnce;
    if constexpr (kOffset) add_ += kAtOnce;
    scale_of_row_ += kAtOnce * scale_stride_;
    out_ += kAtOnce * step_;
    left_ -= kAtOnce;
    if constexpr (kTiles == 2) {
      if (left_ <= 0 && next_ != nullptr) [[unlikely]]
        begin(*next_);
    }
  }

 private:
  static constexpr int kAtOnce = A == Activation::kNone || A == Activation::kRelu ? 1 : 2;
  static constexpr int kHalf = kPanel / 2;

  QFX_INLINE void add_residual(int last, Floats16 (&y)[kAtOnce][2]) {
#pragma GCC unroll 2
    for (int r = 0; r < kAtOnce; ++r) add_line<D>(residual_ + r * last * step_, columns_, y[r]);
    residual_ += kAtOnce * step_;
  }

  QFX_INLINE void begin(const EpilogueArgs& e) {
    if (&e == next_) next_ = nullptr;
    left_ = e.rows;
    if (left_ == 0) return;
    raw_ = e.tile, add_ = e.row_add, mul_ = e.row_mul, scale_of_row_ = e.row_scale,
    scale_stride_ = e.scale_stride;
    out_ = static_cast<char*>(e.out), step_ = e.ldo * (D == Dtype::kFloat32 ? 4 : 2);
    residual_ = e.residual;
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
    __m512i sums[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) sums[i] = _mm512_loadu_si512(raw_ + r * kPanel + kHalf * i);
    if (kOffset || mul_[r] != 0) {  // a symmetric code has no zero point
      const __m512i mul = _mm512_set1_epi32(mul_[r]);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i)
        sums[i] = _mm512_sub_epi32(sums[i], _mm512_mullo_epi32(colsum_[i], mul));
    }
    if constexpr (kOffset) {
      if (add_[r] != 0) [[unlikely]] {
        const __m512i add = _mm512_set1_epi32(add_[r]);
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) sums[i] = _mm512_add_epi32(sums[i], add);
      }
    }
    const Floats16 scale = scale_of_row_[r * scale_stride_];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      y[i] = Floats16(_mm512_cvtepi32_ps(sums[i])) * (scale_[i] * scale) + bias_[i];
    }
  }

  const EpilogueArgs* next_;
  const int32_t *raw_, *add_, *mul_;
  const float* scale_of_row_;
  int64_t scale_stride_;
  char* out_;
  const char* residual_;
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
