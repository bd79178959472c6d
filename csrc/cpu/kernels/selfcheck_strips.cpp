#include "cpu/kernels/selfcheck_strips.h"

#include <algorithm>

namespace qfx::cpu {
namespace {

// What becomes of two panels of up to kMaxTileRows rows, and what should.
struct Outputs {
  static constexpr int kPanelSize = kMaxTileRows * kPanel, kBytes = kPanels * kPanelSize * 4;
  Activation activation;
  Dtype dtype;
  int rows;
  alignas(64) int32_t sums[kPanels * kPanelSize], exact[kPanels * kPanelSize];
  uint8_t out[kBytes] = {}, expected[kBytes] = {};
  float scale[kMaxTileRows];
  int32_t mul[kMaxTileRows];
  Panel panels[kPanels] = {};

  Outputs(int output, int rows, const Format& format, const Arranged& x, const Problem& problem)
      : activation(static_cast<Activation>(output / kDtypes)),
        dtype(static_cast<Dtype>(output % kDtypes)),
        rows(rows) {
    for (int n = 0; n < kPanels * kPanel; ++n) {
      Panel& panel = panels[n / kPanel];
      panel.scale[n % kPanel] = 1.f / static_cast<float>(1000 + n);
      panel.bias[n % kPanel] = n % 4 == 0 ? 0.f : static_cast<float>(n % kPanel - kPanel / 2);
      panel.colsum[n % kPanel] = problem.colsum[n];
      panel.has_bias = true;
    }
    for (int m = 0; m < rows; ++m) {
      scale[m] = m == 2 ? 1e-40f : 1.f / static_cast<float>(1 + m);  // denormal outputs too
      mul[m] = m - 3;
      for (int n = 0; n < kPanels * kPanel; ++n) {
        exact[(n / kPanel * rows + m) * kPanel + n % kPanel] =
            problem.expected[m][n] - x.add[m] + format.mul_offset * problem.colsum[n];
      }
    }
  }

  // Panel p of sums, into its place.
  EpilogueArgs becomes(const Arranged& x, const int32_t* all, uint8_t* to, int p) const {
    const int64_t place = p * rows * kPanel;
    return {all + place, rows,       kPanel, x.add,          mul,   scale, 1,
            &panels[p],  activation, dtype,  to + 4 * place, kPanel};
  }

  bool right(const Arranged& x, int count) {
    for (int p = 0; p < count; ++p) {
      const EpilogueArgs wanted = becomes(x, exact, expected, p);
      kernels_ref().sums->epilogue(&wanted);
    }
    return std::equal(out, out + kBytes, expected);
  }
};

// The tallest strip, all of K in two parts; then all of it at once, which must not change what the
// first left.
bool strip_is_right(const Format& format, StripFn strip, int output, const Problem& problem) {
  const Arranged x(format, kMaxTileRows, 0, problem);
  Outputs parts(output, kMaxTileRows, format, x, problem), whole = parts;
  const auto multiply = [&](int begin, int end, const int32_t* from, const Pending& before) {
    strip(kMaxTileRows, x.a + begin * format.bytes_per_code, x.kStride, problem.b + begin * kPanel,
          (end - begin) / kGroup, problem.b, 0, from, before);
  };
  const int first = format.k_multiple;
  multiply(0, first, nullptr, {});
  multiply(first, x.depth, parts.sums, {parts.sums, {}});
  multiply(0, x.depth, nullptr, {parts.sums, {parts.becomes(x, parts.sums, parts.out, 0)}});
  format.strips->finish({whole.sums, {whole.becomes(x, whole.sums, whole.out, 0)}});
  return parts.right(x, 1) && whole.right(x, 1);
}

bool pair_is_right(const Format& format, StripPairFn pair, int rows, int output,
                   const Problem& problem) {
  const Arranged x(format, rows, 0, problem);
  Outputs before(output, rows, format, x, problem), last = before;
  const auto multiply = [&](const Pending& left) {
    pair(rows, x.a, x.kStride, problem.b, kPanelBytes, x.depth / kGroup, 0, kT0, left);
  };
  const auto left_by = [&](Outputs& of) -> Pending {
    return {of.sums, {of.becomes(x, of.sums, of.out, 0), of.becomes(x, of.sums, of.out, 1)}};
  };
  multiply({});
  multiply(left_by(before));
  format.strips->finish(left_by(last));
  return before.right(x, kPanels) && last.right(x, kPanels);
}

}  // namespace

std::string fault_of_strips(const Kernels& kernels, const Format& format, const Problem& problem) {
  if (format.strips == nullptr) return "";
  const Strips& strips = *format.strips;
  const auto fault = [&](const char* what, int output) {
    return std::string("kernel ") + format.name + what + kernels.isa +
           " computes a wrong output on this processor (activation " +
           std::to_string(output / kDtypes) + ", dtype " + std::to_string(output % kDtypes) + ")";
  };
  for (int output = 0; output < kOutputs; ++output) {
    for (const StripFn* of : {strips.rows_pass, strips.weights_pass}) {
      if (!strip_is_right(format, of[output], output, problem)) return fault("_strips__", output);
    }
    for (int rows : {1, 3, strips.least_rows}) {
      const bool right = pair_is_right(format, strips.pairs[output], rows, output, problem);
      if (!right) return fault("_strip_pairs__", output);
    }
  }
  return "";
}

}  // namespace qfx::cpu
