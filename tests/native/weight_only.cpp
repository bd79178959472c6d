// Float rows times int8 weights, and the epilogue of their sums, against the reference's (W1).
#include <limits>

#include "cpu/gemm/pack.h"
#include "cpu/kernels/selfcheck.h"
#include "cpu/kernels/tables/sums.h"
#include "harness.h"

namespace qfx::test {
namespace {

// Rows of floats times a panel between pages that fault, by the kernels of a table and the
// reference's.
class WeightOnly {
 public:
  WeightOnly(Subject& subject, const WeightOnlyKernels& table, Numbers kind, int64_t k, Place place)
      : subject_(subject),
        table_(table),
        groups_(round_up(k, kGroup) / kGroup),
        values_(numbers(kind, kMaxFloatRows * groups_ * kGroup)),
        block_(static_cast<size_t>(groups_ * kGroup * kPanel)),
        place_(place) {
    subject.begin("K=" + std::to_string(k) + ", operands " + name_of(place));
    for (size_t i = 0; i < block_.size(); ++i) {
      block_[i] = code_at(i / kGroup, i / kPanel, -128, 127);
    }
  }

  void check() {
    static Pages weights, floats;
    const int8_t* b = weights.copy(block_, place_);
    const int64_t size = groups_ * kGroup * kPanel;
    std::vector<float> w(static_cast<size_t>(size));
    kRef.floats_of_codes(block_.data(), groups_, w.data());
    float* found = floats.get<float>(size, place_);
    table_.floats_of_codes(b, groups_, found);
    subject_.same(found, w.data(), size);
    for (int rows = 1; rows <= kMaxFloatRows; ++rows) tiles(rows, b, found, w);
  }

 private:
  void tiles(int rows, const int8_t* b, const float* w, const std::vector<float>& ref_w) {
    static Pages in, out, scales;
    const int64_t ld = groups_ * kGroup;
    const std::vector<float> some(values_.begin(), values_.begin() + rows * ld);
    const float* x = in.copy(some, place_);
    for (int hint = 0; rows <= kFewFloatRows && hint < kHints; ++hint) {
      float* found = out.get<float>(rows * kPanel, place_);
      table_.codes[hint][rows - 1](x, ld, b, groups_, 1 << 12, found);  // what lies ahead faults
      float expected[kMaxFloatRows * kPanel];
      kRef.codes[kT0][rows - 1](some.data(), ld, block_.data(), groups_, 0, expected);
      subject_.same(found, expected, rows * kPanel);
    }
    const FloatTile tile = {x, ld, w, groups_}, ref_tile = {some.data(), ld, ref_w.data(), groups_};
    std::vector<float> before = numbers(kNumbers[0], rows * 2 * kPanel), after = before;
    float* found = out.copy(before, place_);
    table_.chains[rows - 1](tile, found);
    kRef.chains[rows - 1](ref_tile, after.data());
    subject_.same(found, after.data(), rows * 2 * kPanel);
    before.resize(static_cast<size_t>(rows * kPanel));
    after = before;
    const std::vector<float> scale(kPanel, 0.7f);
    found = out.copy(before, place_);
    table_.scaled[rows - 1](tile, scales.copy(scale, place_), found);
    kRef.scaled[rows - 1](ref_tile, scale.data(), after.data());
    subject_.same(found, after.data(), rows * kPanel);
  }

  inline static const WeightOnlyKernels& kRef = *kernels_ref().sums->weight_only;
  Subject& subject_;
  const WeightOnlyKernels& table_;
  const int64_t groups_;
  const std::vector<float> values_;
  std::vector<int8_t> block_;
  const Place place_;
};

// A codes kernel with a planted bug is refused when it is loaded.
void wrong_in_the_last_column(const FloatTile& tile, const float* scale, float* sums) {
  kernels_ref().sums->weight_only->scaled[0](tile, scale, sums);
  sums[kPanel - 1] += 1;
}

void refuse_doctored(const Kernels& kernels) {
  WeightOnlyKernels tiles = *kernels.sums->weight_only;
  tiles.scaled[0] = wrong_in_the_last_column;
  SumKernels sums = *kernels.sums;
  sums.weight_only = &tiles;
  Kernels doctored = kernels;
  doctored.sums = &sums;
  const std::string name = std::string("weight_only__") + kernels.isa;
  if (fault_of(doctored).find(name) == std::string::npos) throw Failure(name + " was not refused");
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
      for (int64_t k : sizes()) {
        WeightOnly(weight_only, *kernels.sums->weight_only, kind, k, place).check();
      }
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
  refuse_doctored(kernels);
  weight_only.passed();
  finish_floats.passed();
}

}  // namespace qfx::test
