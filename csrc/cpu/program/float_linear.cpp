// Linears in float with few outputs, such as the router of a mixture of experts.
#include <algorithm>

#include "cpu/core/parallel.h"
#include "cpu/core/scratch.h"
#include "cpu/kernels/tables/attention.h"
#include "cpu/kernels/tables/rows.h"
#include "cpu/program/instruction.h"

namespace qfx::cpu {
namespace {

// Of floats, or of 16-bit floats, which are widened as they are used.
struct Rows {
  Operand operand;

  const float* in(const Kernels& kernels, char* const* slots, int64_t first, int64_t count,
                  Scratch& scratch) const {
    if (operand.element == Element::kFloat) return operand.in<float>(slots) + first;
    const Dtype dtype = operand.element == Element::kBFloat16 ? Dtype::kBFloat16 : Dtype::kFloat16;
    float* wide = scratch.get<float>(count);
    kernels.row->widen(operand.in<uint16_t>(slots) + first, dtype, count, wide);
    return wide;
  }
};

Rows rows_of(Words& words) {
  const Operand found = words.matrix();
  const bool floats = found.element == Element::kFloat || found.element == Element::kBFloat16 ||
                      found.element == Element::kHalf;
  expect(floats, "an operand has elements of another type");
  return {found};
}

// Outputs of a block have the weights of so many rows, which stay in the first two caches.
constexpr int64_t kBlock = 16;

struct FloatLinear final : Instruction {
  Operand out, x;
  Rows weight;
  bool has_bias;
  Rows bias;

  explicit FloatLinear(Words& words)
      : out(words.written(words.matrix(Element::kFloat))),
        x(words.matrix(Element::kFloat)),
        weight(rows_of(words)),
        has_bias(words.take() != 0),
        bias(has_bias ? rows_of(words) : Rows{}) {
    expect(weight.operand.axes == 2 && n() > 0 && k() > 0, "a linear without weights");
    expect(x.size(-1) == k() && out.size(-1) == n(), "a linear of other sizes");
    expect(x.elements() / k() == out.elements() / n(), "a linear of other rows");
    expect(!has_bias || bias.operand.elements() == n(), "a bias of another size");
  }

  int64_t n() const { return weight.operand.size(0); }
  int64_t k() const { return weight.operand.size(1); }
  int64_t rows() const { return x.elements() / k(); }

  double work() const override {
    return static_cast<double>(rows()) * static_cast<double>(n()) * static_cast<double>(k());
  }

  void run(const Kernels& kernels, char* const* slots) const override {
    const int64_t m = rows(), blocks = (n() + kBlock - 1) / kBlock;
    const int64_t work = static_cast<int64_t>(std::min(this->work(), 1e12));
    parallel(m * blocks, work, [&](int64_t i, int64_t end) {
      thread_local Scratch of_weight, of_bias;
      const float *w = nullptr, *b = nullptr;
      for (bool first = true; i < end; ++i, first = false) {
        const int64_t row = i % m, begin = i / m * kBlock;
        const int64_t count = std::min(kBlock, n() - begin);
        if (first || row == 0) {
          w = weight.in(kernels, slots, begin * k(), count * k(), of_weight);
          if (has_bias) b = bias.in(kernels, slots, begin, count, of_bias);
        }
        float* to = out.in<float>(slots) + row * n() + begin;
        const float* from = x.in<float>(slots) + row * k();
        kernels.attention->score_keys(from, w, k(), count, k(), 1.f, to);
        for (int64_t j = 0; has_bias && j < count; ++j) to[j] += b[j];
      }
    });
  }
};

}  // namespace

Made float_linear_of(Words& words) { return std::make_unique<FloatLinear>(words); }

}  // namespace qfx::cpu
