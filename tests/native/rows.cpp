// The kernels on one row of floats, against those of the reference.
#include "cpu/gemm/quantize.h"
#include "harness.h"

namespace qfx::test {
namespace {

class RowTest {
 public:
  explicit RowTest(const Kernels& kernels) : isa_(kernels.isa), row_(*kernels.row) {}

  void widen() {
    Subject subject = named("widen");
    for (Dtype dtype : {Dtype::kBFloat16, Dtype::kFloat16}) {
      std::vector<uint16_t> all(1 << 16);
      for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
      widen_one(subject, dtype, all, Place::kBeforeGuard);
      for (int64_t n : sizes()) {
        std::vector<uint16_t> x(static_cast<size_t>(n));
        for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<uint16_t>(hash(i));
        for (Place place : kPlaces) widen_one(subject, dtype, x, place);
      }
    }
    subject.passed();
  }

  void range() {
    Subject subject = named("range");
    each_row([&](const std::vector<float>& values, Place place, const std::string& what) {
      subject.begin(what);
      const float* x = in_.copy(values, place);
      int32_t* found = out_.get<int32_t>(3, place);
      Range expected;
      row_.range(x, size(values), reinterpret_cast<Range*>(found));
      ref_.range(values.data(), size(values), &expected);
      subject.same(found, &expected.magnitude, 3);
    });
    subject.passed();
  }

  // With the codes that are chosen from the row.
  void quantize() {
    Subject subject = named("quantize");
    each_row([&](const std::vector<float>& values, Place place, const std::string& what) {
      for (int bits = 2; bits <= 8; ++bits) {
        for (bool symmetric : {false, true}) {
          const RowCode code = own_code(values, {bits, symmetric, false});
          one(subject, what, values, place, code, row_.quantize, ref_.quantize);
        }
      }
    });
    subject.passed();
  }

  // With codes that were chosen elsewhere.
  void quantize_clamped() {
    Subject subject = named("quantize_clamped");
    each_row([&](const std::vector<float>& values, Place place, const std::string& what) {
      const bool finite = own_code(values, {8, true, false}).finite;
      for (float scale : {1.f, 0x1p-126f, 0x1p100f, 0.01f}) {
        for (int zero : {-128, 0, 5, 127}) {
          const RowCode code = {scale, 1.f / scale, zero, -128, 127, finite};
          one(subject, what, values, place, code, row_.quantize_clamped, ref_.quantize_clamped);
        }
      }
    });
    subject.passed();
  }

  void random() {
    Subject subject = named("random");
    for (uint64_t seed : {uint64_t{0}, uint64_t{1}, ~uint64_t{0}, uint64_t{0x123456789abcdef}}) {
      for (int64_t first : {int64_t{0}, int64_t{5}, (int64_t{1} << 29) - 2, int64_t{1} << 50}) {
        for (int64_t groups = 0; groups < 5; ++groups) {
          for (Place place : kPlaces) {
            subject.begin(std::to_string(groups) + " groups from " + std::to_string(first));
            uint16_t* found = out_.get<uint16_t>(groups * kRandomGroup, place);
            std::vector<uint16_t> expected(static_cast<size_t>(groups * kRandomGroup));
            row_.random(seed, first, groups, found);
            ref_.random(seed, first, groups, expected.data());
            subject.same(found, expected.data(), size(expected));
          }
        }
      }
    }
    subject.passed();
  }

  void quantize_stochastic() {
    Subject subject = named("quantize_stochastic");
    each_row([&](const std::vector<float>& values, Place place, const std::string& what) {
      for (int bits : {2, 7, 8}) {
        for (int fill = 0; fill < 3; ++fill)
          stochastic_one(subject, what, values, place, bits, fill);
      }
    });
    subject.passed();
  }

  // Rows of a recurrent cell, whose state is replaced where it lies.
  void gates() {
    Subject subject = named("gates");
    for (Numbers kind : {Numbers::kPlain, Numbers::kTiny, Numbers::kHuge}) {
      for (int64_t n : sizes()) {
        for (Place place : kPlaces) {
          subject.begin(std::to_string(n) + " columns " + name_of(place));
          for (Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16}) {
            gates_of(subject, numbers(kind, 4 * n), n, dtype, place, row_.lstm, ref_.lstm);
            gates_of(subject, numbers(kind, 4 * n), n, dtype, place, row_.gru, ref_.gru);
          }
        }
      }
    }
    subject.passed();
  }

 private:
  template <typename T>
  static int64_t size(const std::vector<T>& values) {
    return static_cast<int64_t>(values.size());
  }

  Subject named(const char* function) const { return Subject(std::string(function) + "__" + isa_); }

  // Calls f(values, place, what) for numbers of each kind, in rows of each size.
  template <typename F>
  static void each_row(const F& f) {
    for (Numbers kind : kNumbers) {
      for (int64_t n : sizes()) {
        const std::vector<float> values = numbers(kind, n);
        for (Place place : kPlaces) {
          f(values, place, std::to_string(n) + " numbers " + name_of(place));
        }
      }
    }
  }

  RowCode own_code(const std::vector<float>& values, const CodeSpec& spec) const {
    Range range;
    ref_.range(values.data(), size(values), &range);
    return code_of(range, spec);
  }

  void widen_one(Subject& subject, Dtype dtype, const std::vector<uint16_t>& values, Place place) {
    subject.begin(std::to_string(values.size()) + " numbers " + name_of(place));
    const uint16_t* x = in_.copy(values, place);
    float* found = out_.get<float>(size(values), place);
    std::vector<float> expected(values.size());
    row_.widen(x, dtype, size(values), found);
    ref_.widen(values.data(), dtype, size(values), expected.data());
    subject.same(found, expected.data(), size(values));
  }

  using Quantize = void (*)(const float*, int64_t, const RowCode*, int8_t*);
  void one(Subject& subject, const std::string& what, const std::vector<float>& values, Place place,
           const RowCode& code, Quantize quantize, Quantize reference) {
    subject.begin(what);
    const float* x = in_.copy(values, place);
    int8_t* found = out_.get<int8_t>(size(values), place);
    std::vector<int8_t> expected(values.size());
    quantize(x, size(values), &code, found);
    reference(values.data(), size(values), &code, expected.data());
    subject.same(found, expected.data(), size(values));
  }

  // Random bits that are all 0, all 1, or mixed.
  void stochastic_one(Subject& subject, const std::string& what, const std::vector<float>& values,
                      Place place, int bits, int fill) {
    std::vector<uint16_t> noise(values.size(), fill == 0 ? 0 : 0xffff);
    for (size_t i = 0; fill == 2 && i < noise.size(); ++i)
      noise[i] = static_cast<uint16_t>(hash(i));
    const uint16_t* random = random_.copy(noise, place);
    subject.begin(what);
    const RowCode code = own_code(values, {bits, true, false});
    const float* x = in_.copy(values, place);
    int8_t* found = out_.get<int8_t>(size(values), place);
    std::vector<int8_t> expected(values.size());
    row_.quantize_stochastic(x, size(values), &code, random, found);
    ref_.quantize_stochastic(values.data(), size(values), &code, noise.data(), expected.data());
    subject.same(found, expected.data(), size(values));
  }

  using Gates = void (*)(const CellRow*);
  void gates_of(Subject& subject, const std::vector<float>& values, int64_t n, Dtype dtype,
                Place place, Gates gates, Gates reference) {
    const std::vector<float> r(values.rbegin(), values.rend()), state(r.begin(), r.begin() + n);
    const int64_t bytes = n * (dtype == Dtype::kFloat32 ? 4 : 2);
    std::vector<float> c = state;
    std::vector<int8_t> h(static_cast<size_t>(bytes));
    const CellRow expected = {values.data(), r.data(), n, state.data(), c.data(), dtype, h.data()};
    reference(&expected);
    CellRow row = {in_.copy(values, place),
                   random_.copy(r, place),
                   n,
                   state_.copy(state, place),
                   c_.copy(state, place),
                   dtype,
                   nullptr};
    row.h = out_.get<int8_t>(bytes, place);
    gates(&row);
    subject.same(static_cast<const int8_t*>(row.h), h.data(), bytes);
    subject.same(row.c, c.data(), n);
  }

  std::string isa_;
  const RowKernels &row_, &ref_ = *kernels_ref().row;
  Pages in_, out_, random_, state_, c_;
};

}  // namespace

void check_rows(const Kernels& kernels) {
  RowTest test(kernels);
  test.widen();
  test.range();
  test.quantize();
  test.quantize_clamped();
  test.random();
  test.quantize_stochastic();
  test.gates();
}

}  // namespace qfx::test
