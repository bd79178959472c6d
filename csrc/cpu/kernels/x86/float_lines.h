// Lines of float sums become outputs, with 512-bit registers. (W1) (E3)
#pragma once

#include "cpu/kernels/tables/sums.h"
#include "cpu/kernels/x86/store_line.h"

namespace qfx::cpu {
namespace {

template <Activation A, Dtype D>
void finish_float_lines(const FloatEpilogueArgs& e) {
  const __mmask32 columns = e.columns == kPanel ? ~0u : (1u << e.columns) - 1;
  const int64_t step = e.ldo * (D == Dtype::kFloat32 ? 4 : 2);
  Floats16 scale[2], bias[2];
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    scale[h] = _mm512_loadu_ps(e.panel->scale + 16 * h);
    bias[h] = e.panel->has_bias ? Floats16(_mm512_loadu_ps(e.panel->bias + 16 * h))
                                : Floats16(-0.f);  // changes nothing, not even -0
  }
  char* out = static_cast<char*>(e.out);
  for (int r = 0; r < e.rows; ++r, out += step) {
    const Floats16 row_scale = e.row_scale[r * e.scale_stride];
    Floats16 y[2];
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const Floats16 sums = _mm512_loadu_ps(e.sums + r * kPanel + 16 * h);
      y[h] = sums * (row_scale * scale[h]) + bias[h];
    }
    if (e.residual != nullptr) add_line<D>(e.residual + r * step, columns, y);
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) y[h] = activate<A>(y[h]);
    store_line<D>(y, columns, e.past_caches, out);
  }
}

inline void finish_all_float_lines(const FloatEpilogueArgs* args) {
  with_output(args->activation, args->dtype,
              [&]<Activation A, Dtype D>() { finish_float_lines<A, D>(*args); });
}

}  // namespace
}  // namespace qfx::cpu
