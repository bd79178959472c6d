// The kernels on the columns of a panel of floats, against those of the reference.
#include "cpu/gemm/quantize.h"
#include "cpu/kernels/tables/rows.h"
#include "harness.h"

namespace qfx::test {
namespace {

constexpr int64_t kMaxGroups = 18;

void range_one(Subject& subject, const RowKernels& row, const std::vector<float>& values,
               Place place) {
  static Pages in, out;
  const int64_t k = static_cast<int64_t>(values.size()) / kPanel;
  subject.begin("K=" + std::to_string(k) + ", operands " + name_of(place));
  const float* x = in.copy(values, place);
  int32_t* found = out.get<int32_t>(kPanel, place);
  int32_t expected[kPanel];
  row.range_of_columns(x, k, found);
  kernels_ref().row->range_of_columns(values.data(), k, expected);
  subject.same(found, expected, kPanel);
}

ColumnCodes codes_for(const std::vector<float>& values, int bits) {
  int32_t magnitude[kPanel];
  kernels_ref().row->range_of_columns(values.data(), static_cast<int64_t>(values.size()) / kPanel,
                                      magnitude);
  ColumnCodes codes;
  for (int n = 0; n < kPanel; ++n) {
    const RowCode code = code_of({magnitude[n], 0, 0}, {bits, true, false});
    codes.inverse[n] = code.inverse;
    codes.finite[n] = code.finite ? -1 : 0;
    codes.qmax = code.qmax;
  }
  return codes;
}

void quantize_one(Subject& subject, const RowKernels& row, const std::vector<float>& values,
                  int bits, Place place) {
  static Pages in, out, sums, parameters;
  const int64_t groups = static_cast<int64_t>(values.size()) / (kPanel * kGroup);
  subject.begin(std::to_string(groups) + " groups, operands " + name_of(place));
  const std::vector<ColumnCodes> codes = {codes_for(values, bits)};
  const float* x = in.copy(values, place);
  int8_t* found = out.get<int8_t>(groups * kPanel * kGroup, place);
  int32_t* colsum = sums.get<int32_t>(kPanel, place);
  std::vector<int8_t> expected(values.size());
  int32_t expected_colsum[kPanel];
  row.quantize_columns(x, groups, parameters.copy(codes, place), found, colsum);
  kernels_ref().row->quantize_columns(values.data(), groups, codes.data(), expected.data(),
                                      expected_colsum);
  subject.same(found, expected.data(), groups * kPanel * kGroup);
  subject.same(colsum, expected_colsum, kPanel);
}

}  // namespace

void check_columns(const Kernels& kernels) {
  Subject range(std::string("range_of_columns__") + kernels.isa);
  Subject quantize(std::string("quantize_columns__") + kernels.isa);
  for (Numbers kind : kNumbers) {
    for (Place place : kPlaces) {
      for (int64_t k = 0; k <= 70; ++k) {
        range_one(range, *kernels.row, numbers(kind, k * kPanel), place);
      }
      for (int64_t groups = 0; groups <= kMaxGroups; ++groups) {
        for (int bits : {2, 4, 7, 8}) {
          quantize_one(quantize, *kernels.row, numbers(kind, groups * kPanel * kGroup), bits,
                       place);
        }
      }
    }
  }
  range.passed();
  quantize.passed();
}

}  // namespace qfx::test
