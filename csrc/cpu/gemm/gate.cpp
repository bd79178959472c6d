#include "cpu/gemm/gate.h"

#include "cpu/kernels/tables/sums.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kStepsPerElement = 32;  // in parallel.h's unit

// A NaN stays one.
float at_most(float x, float limit) { return x > limit ? limit : x; }
float at_least(float x, float limit) { return x < limit ? limit : x; }

}  // namespace

void activate_row(const Kernels& kernels, const float* x, int64_t n, Activation activation,
                  Dtype dtype, void* out) {
  static constexpr FloatPanel kPlain = plain_panel();
  static constexpr float kOne = 1;
  const int64_t lines = n / kPanel, rest = n % kPanel;
  FloatEpilogueArgs args = {
      x, static_cast<int>(lines), kPanel, &kOne, 0, &kPlain, activation, dtype, out, kPanel};
  if (lines > 0) kernels.sums->finish_floats(&args);
  if (rest == 0) return;
  const int64_t element = dtype == Dtype::kFloat32 ? 4 : 2;
  args.sums = x + lines * kPanel;
  args.rows = 1;
  args.columns = static_cast<int>(rest);
  args.out = static_cast<char*>(out) + lines * kPanel * element;
  kernels.sums->finish_floats(&args);
}

void GatedRows::fill(int64_t begin, int64_t end) const {
  thread_local Scratch scratch;
  const bool gated = gate.order != Gate::Order::kNone;
  const int64_t step = gate.order == Gate::Order::kInterleaved ? 2 : 1;
  float* limited = scratch.get<float>(round_up(size, kPanel));
  for (int64_t m = begin; m < end; ++m) {
    const float* g = from + m * gate.inputs(size);
    const float* u = step == 2 ? g + 1 : g + size;
    float* h = to + m * size;
    for (int64_t i = 0; i < size; ++i) limited[i] = at_most(g[i * step], gate.limit);
    activate_row(kernels, limited, size, gate.activation, Dtype::kFloat32, h);
    for (int64_t i = 0; gated && i < size; ++i) {
      h[i] *= at_least(at_most(u[i * step], gate.limit), -gate.limit) + gate.shift;
    }
  }
  codes.fill(begin, end);
}

int64_t GatedRows::work() const { return codes.work() + rows.count * size * kStepsPerElement; }

}  // namespace qfx::cpu
