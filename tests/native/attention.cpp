// Attention of heads that share keys against the reference's (A1) to (A6), and its gradients (A11)
// to (A14), their operands between pages that fault.
#include "cpu/attention/attention.h"

#include <limits>

#include "cpu/attention/backward.h"
#include "harness.h"
#include "threads.h"

namespace qfx::test {
namespace {

struct Shape {
  int64_t m, n, d, e;
};
constexpr Shape kShapes[] = {{1, 1, 1, 1},   {3, 5, 7, 2},     {13, 31, 16, 33},  {2, 64, 20, 32},
                             {25, 70, 5, 1}, {5, 0, 8, 8},     {40, 33, 64, 64},  {7, 130, 3, 40},
                             {0, 9, 4, 4},   {12, 96, 32, 31}, {37, 100, 48, 128}};
constexpr int kMostHeads = 2;  // of queries that share keys

// One operand's pages, and how its rows lie: `gap` elements further apart than they are long.
struct Operand {
  Pages pages;

  FloatMatrix at(Place place, int64_t rows, int64_t columns, int64_t gap, Numbers kind) {
    const int64_t stride = columns + gap, size = rows == 0 ? 0 : rows * stride - gap;
    return {pages.copy(numbers(kind, size), place), Dtype::kFloat32, rows, columns, stride};
  }
};

// Of floats: some keys are taken away by minus infinity, some by the lowest float.
std::vector<float> added(int64_t size) {
  std::vector<float> values = numbers(Numbers::kPlain, size);
  for (size_t i = 0; i < values.size(); ++i) {
    if (hash(i) % 4 == 0) values[i] = std::numeric_limits<float>::lowest();
    if (hash(i) % 4 == 1) values[i] = -std::numeric_limits<float>::infinity();
  }
  return values;
}

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
    mask.data = reinterpret_cast<const char*>(pages.copy(added(rows * shape.n), place));
  }
  return mask;
}

struct Case {
  Shape shape;
  Mask::Kind kind;
  bool causal;
  Numbers values;
  Dtype dtype;
  Place place;
  int heads;
};

void attend_to(Subject& subject, const Kernels& kernels, const Case& c) {
  static Operand q[kMostHeads], k, v;
  static Pages out[kMostHeads];
  const auto [m, n, d, e] = c.shape;
  subject.begin("M=" + std::to_string(m) + " N=" + std::to_string(n) + " D=" + std::to_string(d) +
                " E=" + std::to_string(e) + ", operands " + name_of(c.place));
  Attention attention = {q[0].at(c.place, m, d, 3, c.values),
                         k.at(c.place, n, d, 0, Numbers::kPlain),
                         v.at(c.place, n, e, 5, c.values),
                         mask_of(c.kind, c.shape, c.causal, c.place),
                         0.25f,
                         c.causal,
                         c.dtype,
                         {},
                         {}};
  attention.keys = {{attention.k.data, attention.v.data}};
  const int64_t size = m * e;
  std::vector<char> expected(static_cast<size_t>(c.heads * size * element_of(c.dtype)));
  std::vector<void*> found;
  for (int i = 0; i < c.heads; ++i) {
    const void* rows = i == 0 ? attention.q.data : q[i].at(c.place, m, d, 3, c.values).data;
    char* y = expected.data() + i * size * element_of(c.dtype);
    attention.queries.push_back({rows, attention.mask.data, y});
    found.push_back(out[i].get(size, element_of(c.dtype), c.place));
  }
  attend(kernels_of(Isa::kRef), attention);
  for (int i = 0; i < c.heads; ++i) attention.queries[i].out = static_cast<char*>(found[i]);
  attend(kernels, attention);
  for (int i = 0; i < c.heads; ++i) {
    const char* y = expected.data() + i * size * element_of(c.dtype);
    subject.same_floats(c.dtype, attention.queries[i].out, y, size);
  }
}

// Where results of two runs lie: those of the reference, and those that are compared with them.
struct Results {
  Pages pages;
  std::vector<char> expected;

  // Room for both, in float32.
  void make(int64_t size, Place place) {
    expected.assign(static_cast<size_t>(size) * sizeof(float), 0);
    found = static_cast<char*>(pages.get(size, sizeof(float), place));
  }

  char* of(bool reference) { return reference ? expected.data() : found; }
  char* found = nullptr;
};

void differentiate(Subject& subject, const Kernels& kernels, const Case& c) {
  static Operand q[kMostHeads], g[kMostHeads], k, v;
  static Results dq[kMostHeads], dk, dv;
  const auto [m, n, d, e] = c.shape;
  if (m == 0 || n == 0) return;
  subject.begin("gradients, M=" + std::to_string(m) + " N=" + std::to_string(n) + " D=" +
                std::to_string(d) + " E=" + std::to_string(e) + ", operands " + name_of(c.place));
  AttentionGradient all = {{q[0].at(c.place, m, d, 3, c.values),
                            k.at(c.place, n, d, 0, Numbers::kPlain),
                            v.at(c.place, n, e, 5, c.values),
                            mask_of(c.kind, c.shape, c.causal, c.place),
                            0.25f,
                            c.causal,
                            Dtype::kFloat32,
                            {},
                            {}},
                           g[0].at(c.place, m, e, 1, Numbers::kPlain),
                           {},
                           {}};
  Attention& a = all.forward;
  a.keys = {{a.k.data, a.v.data}};
  dk.make(n * d, c.place);
  dv.make(n * e, c.place);
  for (int i = 0; i < c.heads; ++i) {
    dq[i].make(m * d, c.place);
    const void* rows = i == 0 ? a.q.data : q[i].at(c.place, m, d, 3, c.values).data;
    a.queries.push_back({rows, a.mask.data, nullptr});
    all.heads.push_back(i == 0 ? all.g.data : g[i].at(c.place, m, e, 1, Numbers::kPlain).data);
  }
  for (bool reference : {true, false}) {
    for (int i = 0; i < c.heads; ++i) a.queries[i].out = dq[i].of(reference);
    all.keys = {{dk.of(reference), dv.of(reference)}};
    attend_backward(reference ? kernels_of(Isa::kRef) : kernels, all);
  }
  for (int i = 0; i < c.heads; ++i) {
    subject.same_floats(Dtype::kFloat32, dq[i].found, dq[i].expected.data(), m * d);
  }
  subject.same_floats(Dtype::kFloat32, dk.found, dk.expected.data(), n * d);
  subject.same_floats(Dtype::kFloat32, dv.found, dv.expected.data(), n * e);
}

void check_shape(Subject& subject, const Kernels& kernels, const Shape& shape, Place place) {
  for (Mask::Kind kind : {Mask::Kind::kNone, Mask::Kind::kFloat, Mask::Kind::kBool}) {
    for (bool causal : {false, true}) {
      for (Numbers values : {Numbers::kPlain, Numbers::kNotFinite}) {
        const Dtype dtype = kDtypes[(shape.m + shape.n) % 3];
        const int heads = 1 + static_cast<int>(shape.d + shape.e) % kMostHeads;
        const Case all = {shape, kind, causal, values, dtype, place, heads};
        attend_to(subject, kernels, all);
        differentiate(subject, kernels, all);
      }
    }
  }
}

}  // namespace

void check_attention(const Kernels& kernels) {
  Subject subject(std::string("attention__") + kernels.isa);
  for (Place place : kPlaces) {
    for (const Shape& shape : kShapes) check_shape(subject, kernels, shape, place);
  }
  for (int64_t threads : {3, 7}) {
    test_threads = threads;
    check_shape(subject, kernels, {150, 200, 32, 64}, Place::kBeforeGuard);
  }
  test_threads = 1;
  subject.passed();
}

}  // namespace qfx::test
