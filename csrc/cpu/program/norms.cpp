// Norms of rows.
#include <algorithm>
#include <array>
#include <cmath>

#include "cpu/program/instruction.h"
#include "cpu/program/loops.h"

namespace qfx::cpu {
namespace {

// The sum of f(x[i]), 16 of them side by side and then theirs.
template <typename F>
float sum_of(const float* x, int64_t n, const F& f) {
  constexpr int kSums = 16;
  std::array<float, kSums> sums = {};
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums) {
    for (int s = 0; s < kSums; ++s) sums[s] += f(x[i + s]);
  }
  for (int s = 0; i < n; ++i, ++s) sums[s] += f(x[i]);
  float total = 0.f;
  for (float sum : sums) total += sum;
  return total;
}

// (x - mean) / sqrt(variance + eps) * weight + bias; the variance is that of the differences, so
// that nothing cancels. `out` may be x.
struct LayerNorm final : Instruction {
  Operand out, x, weight = {}, bias = {};
  bool has_weight, has_bias;
  float eps;

  explicit LayerNorm(Words& words)
      : out(words.written(words.matrix(Element::kFloat))),
        x(words.matrix(Element::kFloat)),
        has_weight(words.take() != 0) {
    if (has_weight) weight = words.matrix(Element::kFloat);
    has_bias = words.take() != 0;
    if (has_bias) bias = words.matrix(Element::kFloat);
    eps = words.take_float();
    expect(n() > 0 && out.size(-1) == n() && out.elements() == x.elements(),
           "a norm of other sizes");
    expect((!has_weight || weight.elements() == n()) && (!has_bias || bias.elements() == n()),
           "a norm by weights of another size");
  }

  int64_t n() const { return x.size(-1); }

  double work() const override { return static_cast<double>(x.elements()); }

  void run(const Kernels&, char* const* slots) const override {
    const float* w = has_weight ? weight.in<float>(slots) : nullptr;
    const float* b = has_bias ? bias.in<float>(slots) : nullptr;
    parallel(x.elements() / n(), work_of_elements(x.elements()), [&](int64_t m, int64_t end) {
      for (; m < end; ++m) row(x.in<float>(slots) + m * n(), w, b, out.in<float>(slots) + m * n());
    });
  }

  void row(const float* from, const float* w, const float* b, float* to) const {
    const int64_t n = this->n();
    const auto count = static_cast<float>(n);
    const float mean = sum_of(from, n, [](float x) { return x; }) / count;
    const float variance =
        sum_of(from, n, [mean](float x) { return (x - mean) * (x - mean); }) / count;
    const float inverse = 1.f / std::sqrt(variance + eps);
    for (int64_t i = 0; i < n; ++i) {
      const float y = (from[i] - mean) * inverse, scaled = w == nullptr ? y : y * w[i];
      to[i] = b == nullptr ? scaled : scaled + b[i];
    }
  }
};

}  // namespace

Made layer_norm_of(Words& words) { return std::make_unique<LayerNorm>(words); }

}  // namespace qfx::cpu
