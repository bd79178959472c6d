// Attention of one head against the reference's (A1) to (A6), its operands between pages that
// fault.
#include "cpu/attention.h"

#include "harness.h"

namespace qfx::test {
namespace {

struct Shape {
  int64_t m, n, d, e;
};
constexpr Shape kShapes[] = {{1, 1, 1, 1},   {3, 5, 7, 2},    {13, 31, 16, 33}, {2, 64, 20, 32},
                             {25, 70, 5, 1}, {5, 0, 8, 8},    {40, 33, 64, 64}, {7, 130, 3, 40},
                             {0, 9, 4, 4},   {12, 96, 32, 31}};

// One operand's pages and the values it holds, rows `gap` elements further apart than they are
// long.
struct Operand {
  Pages pages;
  std::vector<float> values;

  FloatMatrix at(Place place, int64_t rows, int64_t columns, int64_t gap, Numbers kind) {
    const int64_t stride = columns + gap, size = rows == 0 ? 0 : rows * stride - gap;
    values = numbers(kind, size);
    return {pages.copy(values, place), Dtype::kFloat32, rows, columns, stride};
  }
};

// The mask's memory: floats or bytes, one row for all queries or one for each.
Mask mask_of(Mask::Kind kind, const Shape& shape, bool one_row, Place place) {
  static Pages pages;
  if (kind == Mask::Kind::kNone) return {};
  const int64_t rows = one_row ? 1 : shape.m, element = kind == Mask::Kind::kBool ? 1 : 4;
  Mask mask = {kind, nullptr, one_row ? 0 : shape.n * element, element};
  if (kind == Mask::Kind::kBool) {
    std::vector<uint8_t> kept(static_cast<size_t>(rows * shape.n));
    for (size_t i = 0; i < kept.size(); ++i) kept[i] = hash(i) % 3 != 0;
    mask.data = reinterpret_cast<const char*>(pages.copy(kept, place));
  } else {
    mask.data =
        reinterpret_cast<const char*>(pages.copy(numbers(Numbers::kPlain, rows * shape.n), place));
  }
  return mask;
}

void attend_to(Subject& subject, const Kernels& kernels, const Shape& shape, Mask::Kind kind,
               bool causal, Numbers values, Dtype dtype, Place place) {
  static Operand q, k, v;
  static Pages out;
  subject.begin("M=" + std::to_string(shape.m) + " N=" + std::to_string(shape.n) +
                " D=" + std::to_string(shape.d) + " E=" + std::to_string(shape.e) + ", operands " +
                name_of(place));
  Attention attention = {q.at(place, shape.m, shape.d, 3, values),
                         k.at(place, shape.n, shape.d, 0, Numbers::kPlain),
                         v.at(place, shape.n, shape.e, 5, values),
                         mask_of(kind, shape, causal, place),
                         0.25f,
                         causal,
                         dtype,
                         nullptr};
  const int64_t size = shape.m * shape.e;
  std::vector<char> expected(static_cast<size_t>(size * element_of(dtype)));
  attention.out = expected.data();
  attend(kernels_of(Isa::kRef), attention);
  attention.out = static_cast<char*>(out.get(size, element_of(dtype), place));
  attend(kernels, attention);
  subject.same_floats(dtype, attention.out, expected.data(), size);
}

}  // namespace

void check_attention(const Kernels& kernels) {
  Subject subject(std::string("attention__") + kernels.isa);
  for (Place place : kPlaces) {
    for (const Shape& shape : kShapes) {
      for (Mask::Kind kind : {Mask::Kind::kNone, Mask::Kind::kFloat, Mask::Kind::kBool}) {
        for (bool causal : {false, true}) {
          for (Numbers values : {Numbers::kPlain, Numbers::kNotFinite}) {
            const Dtype dtype = kDtypes[(shape.m + shape.n) % 3];
            attend_to(subject, kernels, shape, kind, causal, values, dtype, place);
          }
        }
      }
    }
  }
  subject.passed();
}

}  // namespace qfx::test
