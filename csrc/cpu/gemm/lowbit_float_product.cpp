// Float activations times weights of 4 and 5 bits. (W3)
#include <algorithm>

#include "cpu/core/parallel.h"
#include "cpu/gemm/float_tiles.h"
#include "cpu/gemm/lowbit_panel.h"
#include "cpu/gemm/lowbit_product.h"

namespace qfx::cpu {
namespace {

// The sums of groups of x, [G][rows], as (W1) adds them up for weights that are 1: fma(x, 1, s) is
// x + s. Null where no minimums need them.
const float* sums_of_groups(const FloatRowsInMemory& x, const LowbitWeight& w) {
  if (w.kind.shift != Shift::kMinimums) return nullptr;
  thread_local Scratch scratch;
  float* out = scratch.get<float>(w.shape.groups() * x.rows);
  for (int64_t g = 0; g < w.shape.groups(); ++g) {
    for (int64_t m = 0; m < x.rows; ++m) {
      const float* from = x.data + m * x.stride + g * w.kind.group;
      float s[2] = {};
      for (int64_t k = 0; k < round_up(w.length(g), kGroup); ++k) s[k % kGroup / 2] += from[k];
      out[g * x.rows + m] = s[0] + s[1];
    }
  }
  return out;
}

// One panel times rows of floats, which are added up group by group. (W3)
class FloatPanelProduct {
 public:
  FloatPanelProduct(const Kernels& kernels, const FloatRowsInMemory& x, const float* x_sums,
                    const LowbitWeight& w, int64_t p, PanelMemory& memory)
      : kernels_(kernels),
        multiply_(*kernels.sums->weight_only),
        x_(x),
        x_sums_(x_sums),
        w_(w),
        p_(p),
        memory_(memory),
        sums_(memory.sums.get<float>(x.rows * kPanel)) {}

  // [rows][32]
  const float* run() const {
    constexpr int64_t kAtOnce = 512;  // of K, whose codes stay in the first cache
    std::fill_n(sums_, x_.rows * kPanel, 0.f);
    UnpackedPanel reader(kernels_, w_, p_, memory_);
    for (int64_t k = 0; k < w_.shape.k; k += kAtOnce) {
      const int64_t end = std::min(k + kAtOnce, round_up(w_.shape.k, kUnpackMultiple));
      multiply(reader.read(k, end), k, end);
    }
    if (x_sums_ != nullptr) add_minimums();
    return sums_;
  }

 private:
  void multiply(const PanelGroups& groups, int64_t begin, int64_t end) const {
    for (int64_t k = begin, i = 0; k < end; k += w_.kind.group, ++i) {
      const int8_t* b = groups.b + i * w_.kind.group * kPanel;
      const float* scale = groups.scale.from(i).data;
      const int64_t quads = (w_.length(k / w_.kind.group) + kGroup - 1) / kGroup;
      if (x_.rows <= kFewFloatRows) {
        multiply_few(b, quads, k, scale);
      } else {
        multiply_many(b, quads, k, scale);
      }
    }
  }

  void multiply_few(const int8_t* b, int64_t quads, int64_t k, const float* scale) const {
    float dots[kFewFloatRows * kPanel];
    multiply_.codes[kT0][x_.rows - 1](x_.data + k, x_.stride, b, quads, 0, dots);
    for (int64_t m = 0; m < x_.rows; ++m) {
      kernels_.lowbit->add_scaled(dots + m * kPanel, 1.f, scale, sums_ + m * kPanel);
    }
  }

  void multiply_many(const int8_t* b, int64_t quads, int64_t k, const float* scale) const {
    float* floats = memory_.floats.get<float>(w_.kind.group * kPanel);
    multiply_.floats_of_codes(b, quads, floats);
    for_each_float_tile(x_.rows, [&](int64_t m, int64_t rows) {
      const FloatTile tile = {x_.data + m * x_.stride + k, x_.stride, floats, quads};
      multiply_.scaled[rows - 1](tile, scale, sums_ + m * kPanel);
    });
  }

  void add_minimums() const {
    const Minimums minimums = {kernels_, w_, p_};
    float minimum[kPanel];
    for (int64_t g = 0; g < w_.shape.groups(); ++g) {
      minimums.load(g, minimum);
      for (int64_t m = 0; m < x_.rows; ++m) {
        minimums.add(x_sums_[g * x_.rows + m], 1.f, minimum, sums_ + m * kPanel);
      }
    }
  }

  const Kernels& kernels_;
  const WeightOnlyKernels& multiply_;
  const FloatRowsInMemory& x_;
  const float* const x_sums_;
  const LowbitWeight& w_;
  const int64_t p_;
  PanelMemory& memory_;
  float* const sums_;
};

}  // namespace

void lowbit_weight_linear(const Kernels& kernels, const FloatRowsInMemory& x, const LowbitWeight& w,
                          const FloatOutput& to) {
  constexpr int64_t kStepsPerProduct = 4;  // in parallel.h's unit
  const int64_t products = x.rows * w.shape.n * w.shape.k;
  const float* x_sums = sums_of_groups(x, w);
  parallel(w.shape.panels(), kStepsPerProduct * products, [&](int64_t begin, int64_t end) {
    thread_local PanelMemory memory;
    for (int64_t p = begin; p < end; ++p) {
      const float* sums = FloatPanelProduct(kernels, x, x_sums, w, p, memory).run();
      finish_sums(kernels, {w.shape, 0, x.rows, p, false}, to, sums);
    }
  });
}

}  // namespace qfx::cpu
