// Weights in groups of K: sums of groups as floats, and whole products on one thread and on
// several, both against plain loops (E3).
#include <cmath>
#include <limits>

#include "cpu/gemm/group_product.h"
#include "cpu/gemm/weight.h"
#include "cpu/kernels/tables/sums.h"
#include "harness.h"
#include "threads.h"

namespace qfx::test {
namespace {

constexpr int64_t kThreads[] = {1, 2, 5};
constexpr struct {
  int64_t m, n, k, group;
} kShapes[] = {{0, 33, 64, 64},     {1, 1, 1, 64},      {1, 70, 1500, 64},  {2, 64, 700, 128},
               {3, 32, 192, 0},     {13, 65, 100, 64},  {5, 33, 1030, 448}, {25, 33, 0, 64},
               {37, 70, 1100, 576}, {241, 40, 129, 64}, {7, 257, 700, 192}, {33, 65, 1100, 32},
               {6, 40, 300, 96},    {66, 33, 640, 128}};

float value_of(int64_t i) { return static_cast<float>(hash(i) % 1000) * 0x1p-16f; }

// One call of add_groups, everything it reads beside a guard.
class SumTest {
 public:
  explicit SumTest(const Kernels& kernels)
      : table_(*kernels.sums), subject_(std::string("add_groups__") + kernels.isa) {}

  void run(int rows, int64_t groups, bool with_zero, Place place) {
    subject_.begin(std::to_string(rows) + " rows, " + std::to_string(groups) + " groups" +
                   (with_zero ? ", zero points" : "") + ", operands " + name_of(place));
    const int64_t scale_step = kPanel + groups % 3, row_step = rows + 2;
    const int64_t of_rows = (groups - 1) * row_step + rows;
    const std::vector<int32_t> raw = ints(groups * rows * kPanel, 4), mul = ints(of_rows, 23);
    const std::vector<int32_t> add = ints(of_rows, 10), sum = ints(of_rows, 16);
    const std::vector<int32_t> colsum = ints(groups * kPanel, 18), zero = ints(groups * kPanel, 24);
    std::vector<float> scale, sums, row_scale;
    for (int64_t i = 0; i < of_rows; ++i) row_scale.push_back(value_of(i + 3));
    for (int64_t i = 0; i < (groups - 1) * scale_step + kPanel; ++i) scale.push_back(value_of(i));
    scale[kPanel / 2] = std::numeric_limits<float>::quiet_NaN();
    for (int64_t i = 0; i < rows * kPanel; ++i) sums.push_back(value_of(i + 7));
    float* found = sums_.copy(sums, place);
    const GroupTerms terms = {add_.copy(add, place),
                              mul_.copy(mul, place),
                              sum_.copy(sum, place),
                              nullptr,
                              row_scale_.copy(row_scale, place),
                              row_step,
                              colsum_.copy(colsum, place),
                              scale_.copy(scale, place),
                              scale_step,
                              with_zero ? zero_.copy(zero, place) : nullptr,
                              with_zero ? kPanel : 0,
                              found};
    table_.add_groups(raw_.copy(raw, place), groups, rows, &terms);
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t i = 0; i < rows * kPanel; ++i) {
        const int64_t m = i / kPanel, n = i % kPanel;
        int64_t acc = raw[g * rows * kPanel + i] + int64_t{add[g * row_step + m]};
        const int64_t row = g * row_step + m;
        acc -= int64_t{mul[row]} * colsum[g * kPanel + n];
        if (with_zero) acc -= int64_t{sum[row]} * zero[g * kPanel + n];
        const float term = static_cast<float>(static_cast<int32_t>(static_cast<uint32_t>(acc)));
        sums[i] = std::fma(term, row_scale[row] * scale[g * scale_step + n], sums[i]);
      }
    }
    subject_.same(found, sums.data(), rows * kPanel);
  }

  void passed() const { subject_.passed(); }

 private:
  static std::vector<int32_t> ints(int64_t count, int shift) {
    std::vector<int32_t> made;
    for (int64_t i = 0; i < count; ++i) made.push_back(static_cast<int32_t>(hash(i)) >> shift);
    return made;
  }

  const SumKernels& table_;
  Subject subject_;
  Pages raw_, add_, sum_, mul_, row_scale_, colsum_, scale_, zero_, sums_;
};

// Everything of a linear, and (E3).
struct Linear {
  int64_t m, n, k, group;
  std::vector<int8_t> q, w;
  int64_t groups, row_groups;                // of a row, and those that have values of their own
  std::vector<int32_t> zero_points, w_zero;  // w_zero[n][g], scales too
  std::vector<float> scale, w_scale, bias, expected;

  // With zero points rows have them too, and groups of rows have values of their own.
  Linear(const Limits& limits, int64_t m, int64_t n, int64_t k, int64_t group, bool with_zero)
      : m(m), n(n), k(k), group(group) {
    const int64_t step = group > 0 ? group : std::max<int64_t>(k, 1);
    groups = (k + step - 1) / step;
    row_groups = with_zero ? groups : 1;
    for (int64_t i = 0; i < m * k; ++i)
      q.push_back(code_at(i / k * 3 + i / 7 % 4, i % k, limits.a_low, limits.a_high));
    for (int64_t i = 0; i < n * k; ++i)
      w.push_back(code_at(i / k, i % k, limits.w_low, limits.w_high));
    for (int64_t i = 0; i < m * row_groups; ++i) {
      zero_points.push_back(with_zero ? static_cast<int32_t>(hash(i) % 256) - 128 : 0);
      const bool fault = i / row_groups % 7 == 6;
      scale.push_back(fault ? std::numeric_limits<float>::quiet_NaN() : value_of(i));
    }
    for (int64_t i = 0; i < n * groups; ++i) {
      w_scale.push_back(value_of(i + 11));
      w_zero.push_back(with_zero ? static_cast<int32_t>(hash(i + 5) % 256) - 128 : 0);
    }
    for (int64_t i = 0; i < n; ++i) bias.push_back(value_of(i) - 0.01f);
    for (int64_t i = 0; i < m * n; ++i) expected.push_back(output(i / n, i % n, step));
  }

  float output(int64_t row, int64_t column, int64_t step) const {
    float sum = 0;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t at = row * row_groups + (row_groups == 1 ? 0 : g);
      int32_t acc = 0;
      for (int64_t i = g * step; i < std::min(k, (g + 1) * step); ++i) {
        acc +=
            (q[row * k + i] - zero_points[at]) * (w[column * k + i] - w_zero[column * groups + g]);
      }
      sum = std::fma(static_cast<float>(acc), scale[at] * w_scale[column * groups + g], sum);
    }
    return sum + bias[column];
  }
};

class LinearTest {
 public:
  explicit LinearTest(const Kernels& kernels)
      : kernels_(kernels), subject_(std::string("linear_groups__") + kernels.isa) {}

  void run(const Linear& l, bool with_zero, Place place) {
    const PackedKind kind = {l.group, l.group > 0, with_zero};
    const int64_t size = packed_size(l.n, l.k, kind);
    auto* packed = reinterpret_cast<int8_t*>(packed_.get<int32_t>(size / 4, place));
    const bool some = !l.w_scale.empty();
    pack({w_.copy(l.w, place), l.n, l.k, l.k, 1, some ? scale_.copy(l.w_scale, place) : nullptr,
          some ? zero_.copy(l.w_zero, place) : nullptr},
         kind, packed);
    Weight opened = {};
    const std::string fault = open_weight(packed, size, &opened);
    if (!fault.empty()) throw Failure("a packed weight is refused: " + fault);
    const PackedWeight& w = opened.whole;
    const int8_t* q = q_.copy(l.q, place);
    const int64_t step_g = l.row_groups == 1 ? 0 : 1;
    const RowValues<int32_t> zeros = {zeros_.copy(l.zero_points, place), l.row_groups, step_g};
    const RowValues<float> scales = {row_scale_.copy(l.scale, place), l.row_groups, step_g};
    for (int64_t threads : kThreads) {
      cpu::test_threads = threads;
      subject_.begin("M=" + std::to_string(l.m) + " N=" + std::to_string(l.n) +
                     " K=" + std::to_string(l.k) + " group " + std::to_string(l.group) + ", " +
                     std::to_string(threads) + " threads, operands " + name_of(place));
      float* out = out_.get<float>(l.m * l.n, place);
      const FloatOutput to = {bias_.copy(l.bias, place), Activation::kNone, Dtype::kFloat32,
                              reinterpret_cast<char*>(out)};
      const Format& format = format_of_codes(kernels_, w, q, l.m);
      const GroupedCodes rows(format, w, q, scales, zeros, l.m, with_zero);
      const GroupedLinear all[] = {{w, to}};
      grouped_linears(kernels_, rows, all, 0);
      subject_.same(out, l.expected.data(), l.m * l.n);
    }
  }

  void passed() const { subject_.passed(); }

 private:
  const Kernels& kernels_;
  Subject subject_;
  Pages q_, w_, packed_, zeros_, scale_, zero_, row_scale_, bias_, out_;
};

}  // namespace

void check_groups(const Kernels& kernels) {
  SumTest sums(kernels);
  for (int rows = 1; rows <= kMaxTileRows; ++rows) {
    for (int64_t groups : {1, 2, 7, 8}) {
      for (Place place : kPlaces) {
        for (bool with_zero : {false, true}) sums.run(rows, groups, with_zero, place);
      }
    }
  }
  sums.passed();
  LinearTest linear(kernels);
  for (const auto& [m, n, k, group] : kShapes) {
    for (int kind = 0; kind < kOperandKinds; ++kind) {
      for (bool with_zero : {false, true}) {
        const Linear l(limits_of(static_cast<Operands>(kind)), m, n, k, group, with_zero);
        for (Place place : kPlaces) linear.run(l, with_zero, place);
      }
    }
  }
  for (const Tuning& tuning : kTunings) {
    const WithTuning set(kernels, tuning);
    for (const auto& [m, n, k, group] : kShapes) {
      linear.run(Linear(limits_of(Operands::kWide), m, n, k, group, true), true,
                 Place::kBeforeGuard);
    }
  }
  cpu::test_threads = 1;
  linear.passed();
}

}  // namespace qfx::test
