// The transform of a row before it is quantized, there and back, against the reference. (R1)
#include <bit>

#include "cpu/kernels/tables/rows.h"
#include "harness.h"

namespace qfx::test {
namespace {

constexpr int32_t kInfinity = 0x7f800000;
constexpr int kRotations[] = {0, 2, 4, 8, 16, 32, 64, 128, 256};

class RotateTest {
 public:
  explicit RotateTest(const Kernels& kernels)
      : row_(*kernels.row),
        there_(std::string("rotate__") + kernels.isa),
        back_(std::string("rotate_back__") + kernels.isa) {}

  // `in_place`: the result takes the place of x.
  void one(Numbers kind, int64_t n, int rotation, bool with_factor, Place place, bool in_place) {
    const std::string what = std::to_string(n) + " numbers " + name_of(place) + ", rotation " +
                             std::to_string(rotation) + (with_factor ? " and a factor" : "");
    const std::vector<float> values = numbers(kind, n), factors = numbers(Numbers::kPlain, n);
    float* x = x_.copy(values, place);
    const float* factor = with_factor ? factor_.copy(factors, place) : nullptr;
    float* out = in_place ? x : out_.get<float>(n, place);
    const Transform here = {factor, rotation},
                    there = {with_factor ? factors.data() : nullptr, rotation};
    std::vector<float> expected(values.size());
    Range range, expected_range;
    there_.begin(what);
    row_.rotate(x, n, &here, out, &range);
    ref_.rotate(values.data(), n, &there, expected.data(), &expected_range);
    there_.same(out, expected.data(), n);
    same_range(range, expected_range);
    back_.begin(what);
    x_.copy(values, place);
    row_.rotate_back(x, n, &here, out);
    ref_.rotate_back(values.data(), n, &there, expected.data());
    back_.same(out, expected.data(), n);
  }

  void passed() const {
    there_.passed();
    back_.passed();
  }

 private:
  // One NaN is as good as another, so what bounds a row with one may differ.
  void same_range(const Range& found, const Range& expected) const {
    const float magnitude = std::bit_cast<float>(found.magnitude),
                other = std::bit_cast<float>(expected.magnitude);
    there_.same(&magnitude, &other, 1);
    if (expected.magnitude < kInfinity) there_.same(&found.magnitude, &expected.magnitude, 3);
  }

  const RowKernels &row_, &ref_ = *kernels_ref().row;
  Subject there_, back_;
  Pages x_, factor_, out_;
};

}  // namespace

void check_rotate(const Kernels& kernels) {
  RotateTest test(kernels);
  for (Numbers kind : kNumbers) {
    for (int rotation : kRotations) {
      for (int64_t n : sizes()) {
        if (rotation != 0 && n % rotation != 0) n *= rotation;
        if (n > 70 * 64) continue;
        for (Place place : kPlaces) {
          for (bool with_factor : {false, true}) {
            for (bool in_place : {false, true})
              test.one(kind, n, rotation, with_factor, place, in_place);
          }
        }
      }
    }
  }
  test.passed();
}

}  // namespace qfx::test
