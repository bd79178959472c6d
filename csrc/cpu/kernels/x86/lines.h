// Lines of a tile, its rows of 32 sums, which become outputs one at a time between the products of
// the next tile. (E1)
#pragma once

#include "cpu/kernels/rows/epilogue.h"
#include "cpu/kernels/tables/sums.h"

namespace qfx::cpu {
namespace {

// What a line needs of its columns is kept in registers without an activation and with relu, as
// tiles leave few loads that cost nothing; the constants of the others leave no room for it. Rows
// have nothing to add, as the operand format is the codes themselves.
template <Activation A>
class Lines {
 public:
  explicit inline __attribute__((always_inline)) Lines(const EpilogueArgs& e)
      : raw_(e.tile),
        mul_(e.row_mul),
        scale_of_row_(e.row_scale),
        scale_stride_(e.scale_stride),
        out_(static_cast<char*>(e.out)),
        step_(e.ldo * (e.dtype == Dtype::kFloat32 ? 4 : 2)),
        left_(e.rows),
        columns_(e.columns),
        dtype_(e.dtype) {
    if (left_ == 0) return;
    for (int i = 0; i < 2; ++i) {
      __builtin_memcpy(&scale_[i], e.panel->scale + kHalf * i, sizeof(Floats));
      __builtin_memcpy(&colsum_[i], e.panel->colsum + kHalf * i, sizeof(Sums));
      if (e.panel->has_bias) {
        __builtin_memcpy(&bias_[i], e.panel->bias + kHalf * i, sizeof(Floats));
      } else {
        bias_[i] = Floats{} - 0.f;
        bias_[i] = -bias_[i];  // -0 changes nothing, not even -0
      }
    }
  }

  inline __attribute__((always_inline)) int left() const { return left_; }

  inline __attribute__((always_inline)) void line() {
    alignas(64) float y[kPanel];
    const uint32_t mul = static_cast<uint32_t>(*mul_++);
    const float scale = *scale_of_row_;
    for (int i = 0; i < 2; ++i) {
      Sums sum;
      __builtin_memcpy(&sum, raw_ + kHalf * i, sizeof(sum));
      sum -= colsum_[i] * mul;
      const Floats v =
          __builtin_convertvector(reinterpret_cast<Integers>(sum), Floats) * (scale_[i] * scale) +
          bias_[i];
      __builtin_memcpy(y + kHalf * i, &v, sizeof(v));
    }
    activate_all<A>(y);
    store_row(y, columns_, dtype_, out_);
    raw_ += kPanel;
    scale_of_row_ += scale_stride_;
    out_ += step_;
    --left_;
  }

 private:
  static constexpr int kHalf = kPanel / 2;
  using Floats = float __attribute__((vector_size(4 * kHalf)));
  using Integers = int32_t __attribute__((vector_size(4 * kHalf)));
  using Sums = uint32_t __attribute__((vector_size(4 * kHalf)));  // which wrap

  const int32_t *raw_, *mul_;
  const float* scale_of_row_;
  int64_t scale_stride_;
  char* out_;
  int64_t step_;
  int left_, columns_;
  Dtype dtype_;
  Floats scale_[2], bias_[2];
  Sums colsum_[2];
};

}  // namespace
}  // namespace qfx::cpu
