// Float rows times int8 weights, and the epilogue of their sums, against the reference's (W1).
#include <limits>

#include "cpu/gemm/pack.h"
#include "cpu/kernels/tables/sums.h"
#include "harness.h"

namespace qfx::test {
namespace {

void sums_of(Subject& subject, const SumKernels& table, Numbers kind, int64_t k, Place place) {
  static Pages in, weights, out;
  subject.begin("K=" + std::to_string(k) + ", operands " + name_of(place));
  std::vector<float> values = numbers(kind, k);
  values.resize(static_cast<size_t>(round_up(k, kGroup)));
  const int64_t groups = static_cast<int64_t>(values.size()) / kGroup;
  std::vector<int8_t> block(values.size() * kPanel);
  for (size_t i = 0; i < block.size(); ++i) block[i] = code_at(i / kGroup, i / kPanel, -128, 127);
  const float* x = in.copy(values, place);
  const int8_t* b = weights.copy(block, place);
  float* found = out.get<float>(kPanel, place);
  float expected[kPanel];
  kernels_ref().sums->weight_only[kT0](values.data(), block.data(), groups, 0, expected);
  for (const auto multiply : table.weight_only) {
    multiply(x, b, groups, 1 << 12, found);  // what lies ahead faults
    subject.same(found, expected, kPanel);
  }
}

void finish(Subject& subject, const SumKernels& table, Dtype dtype, Activation activation,
            int columns, bool has_bias, Place place) {
  static Pages in, panels, scales, out;
  subject.begin(std::to_string(columns) + " columns, operands " + name_of(place));
  std::vector<FloatPanel> panel(1);
  panel[0].has_bias = has_bias;
  for (int n = 0; n < kPanel; ++n) {
    panel[0].scale[n] = static_cast<float>(n) * 0.01f;
    panel[0].bias[n] = static_cast<float>(n) - 16.5f;
  }
  const Numbers kind = kNumbers[columns % 4];
  const int rows = columns % 3 + 1, step = columns % 2;
  const std::vector<float> sums = numbers(kind, rows * kPanel);
  std::vector<float> scale = {1.f, 0.02f, std::numeric_limits<float>::quiet_NaN()};
  scale.resize(static_cast<size_t>(step == 1 ? rows : 1));
  const int64_t ldo = columns + 3, count = (rows - 1) * ldo + columns;
  void* found = out.get(count, element_of(dtype), place);
  std::vector<uint8_t> expected(static_cast<size_t>(count * element_of(dtype)), Pages::kCanary);
  FloatEpilogueArgs args = {sums.data(),  rows,       columns, scale.data(),    step,
                            panel.data(), activation, dtype,   expected.data(), ldo};
  kernels_ref().sums->finish_floats(&args);
  args.sums = in.copy(sums, place);
  args.row_scale = scales.copy(scale, place);
  args.panel = panels.copy(panel, place);
  args.out = found;
  table.finish_floats(&args);
  subject.same_floats(dtype, found, expected.data(), count);
}

}  // namespace

void check_weight_only(const Kernels& kernels) {
  Subject weight_only(std::string("weight_only__") + kernels.isa);
  Subject finish_floats(std::string("finish_floats__") + kernels.isa);
  for (Place place : kPlaces) {
    for (Numbers kind : kNumbers) {
      for (int64_t k : sizes()) sums_of(weight_only, *kernels.sums, kind, k, place);
    }
    for (Dtype dtype : kDtypes) {
      for (Activation activation : kActivations) {
        for (int columns = 1; columns <= kPanel; ++columns) {
          for (bool bias : {false, true}) {
            finish(finish_floats, *kernels.sums, dtype, activation, columns, bias, place);
          }
        }
      }
    }
  }
  weight_only.passed();
  finish_floats.passed();
}

}  // namespace qfx::test
