// The epilogue (E1) for every dtype, activation and number of columns, against the reference's.
#include <cmath>
#include <limits>

#include "cpu/kernels/tables/sums.h"
#include "harness.h"

namespace qfx::test {
namespace {

// A tile with everything that its epilogue reads.
struct Tile {
  std::vector<int32_t> sums, row_add, row_mul;
  std::vector<float> row_scale;
  std::vector<Panel> panel;

  // Sums that give outputs from tiny to huge, some that wrap, and a row whose scale is NaN.
  Tile(int rows, bool has_bias, bool scale_per_row) : panel(1) {
    for (int i = 0; i < rows * kPanel; ++i) {
      const int32_t any = static_cast<int32_t>(hash(i));
      sums.push_back(i % 5 == 0 ? any : any >> (8 + i % 20));
    }
    for (int m = 0; m < rows; ++m) {
      row_add.push_back(static_cast<int32_t>(hash(m + 100)) >> (m % 3 * 8));
      row_mul.push_back(m * 50 - 128);
    }
    const float scales[] = {0x1p-12f, 0x1p-20f, 3.f, std::numeric_limits<float>::quiet_NaN()};
    for (int m = 0; m < (scale_per_row ? rows : 1); ++m) row_scale.push_back(scales[m % 4]);
    panel[0].has_bias = has_bias;
    for (int n = 0; n < kPanel; ++n) {
      panel[0].scale[n] = n % 9 == 8 ? 0.f : std::ldexp(1.f, -n % 13);
      panel[0].bias[n] = static_cast<float>(n) - 16.5f;
      panel[0].colsum[n] = static_cast<int32_t>(hash(n)) >> 10;
    }
  }
};

struct Case {
  Dtype dtype;
  Activation activation;
  int rows, columns, number;  // the case's number decides the strides

  std::string text() const {
    return std::to_string(rows) + "x" + std::to_string(columns) + ", dtype " +
           std::to_string(static_cast<int>(dtype)) + ", activation " +
           std::to_string(static_cast<int>(activation));
  }
};

// Output rows lie apart in every other case; what lies between them stays as it was.
struct Output {
  int64_t ldo, count;
  explicit Output(const Case& c)
      : ldo(c.columns + (c.number & 1) * 3), count((c.rows - 1) * ldo + c.columns) {}
};

// What is added to `count` outputs: numbers of either sign below 2, none of them a NaN.
template <typename Bits>
std::vector<Bits> residual_of(int64_t count) {
  constexpr Bits kSmall = static_cast<Bits>(~(Bits{1} << (8 * sizeof(Bits) - 2)));
  std::vector<Bits> found(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    found[i] = static_cast<Bits>(hash(static_cast<int>(i) + 7)) & kSmall;
  }
  return found;
}

class EpilogueTest {
 public:
  explicit EpilogueTest(const Kernels& kernels)
      : table_(*kernels.sums), subject_(std::string("epilogue__") + kernels.isa) {}

  void run(const Case& c, Place place) {
    subject_.begin(c.text() + ", operands " + name_of(place));
    const Output output(c);
    const bool scale_per_row = c.number & 4;
    const Tile tile(c.rows, c.number & 2, scale_per_row);
    const int64_t bytes = output.count * element_of(c.dtype);
    void* found = out_.get(output.count, element_of(c.dtype), place);
    std::vector<uint8_t> expected(static_cast<size_t>(bytes), Pages::kCanary);
    EpilogueArgs args = {tile.sums.data(),    c.rows,
                         c.columns,           tile.row_add.data(),
                         tile.row_mul.data(), tile.row_scale.data(),
                         scale_per_row,       tile.panel.data(),
                         c.activation,        c.dtype,
                         expected.data(),     output.ldo};
    if (c.number % 3 == 0) args.residual = residual(c.dtype, output.count, place);
    kernels_ref().sums->epilogue(&args);
    args.tile = sums_.copy(tile.sums, place);
    args.row_add = add_.copy(tile.row_add, place);
    args.row_mul = mul_.copy(tile.row_mul, place);
    args.row_scale = scale_.copy(tile.row_scale, place);
    args.panel = panel_.copy(tile.panel, place);
    args.out = found;
    table_.epilogue(&args);
    subject_.same_floats(c.dtype, found, expected.data(), output.count);
  }

  void passed() const { subject_.passed(); }

 private:
  const char* residual(Dtype dtype, int64_t count, Place place) {
    const void* found =
        dtype == Dtype::kFloat32
            ? static_cast<const void*>(residual_.copy(residual_of<uint32_t>(count), place))
            : residual_.copy(residual_of<uint16_t>(count), place);
    return static_cast<const char*>(found);
  }

  const SumKernels& table_;
  Subject subject_;
  Pages out_, sums_, add_, mul_, scale_, panel_, residual_;
};

}  // namespace

void check_epilogue(const Kernels& kernels) {
  EpilogueTest test(kernels);
  for (Dtype dtype : kDtypes) {
    for (Activation activation : kActivations) {
      for (int columns = 1; columns <= kPanel; ++columns) {
        for (int number = 0; number < 8; ++number) {
          const int rows = (columns + number * 5) % kMaxTileRows + 1;
          const Case c = {dtype, activation, rows, columns, number};
          for (Place place : kPlaces) test.run(c, place);
        }
      }
    }
  }
  test.passed();
}

}  // namespace qfx::test
