// Linears of floats that are quantized as they come, by weights of any kind: linear_dynamic,
// linears.
#include "cpu/program/instruction.h"
#include "cpu/program/weights.h"

namespace qfx::cpu {
namespace {

// Floats that are quantized once, for all weights that they meet.
struct Quantization {
  Operand x;
  bool has_factor;
  Operand factor;
  RowsCode code;

  explicit Quantization(Words& words)
      : x(words.matrix(Element::kFloat)),
        has_factor(words.take() != 0),
        factor(has_factor ? words.matrix(Element::kFloat) : Operand{}),
        code(words, k()) {
    expect(!has_factor || factor.elements() == k(), "a factor of another size");
  }

  int64_t k() const { return x.size(-1); }
  int64_t rows() const { return x.elements() / k(); }

  QuantizedFloats in(char* const* slots) const {
    const Transform transform = {has_factor ? factor.in<float>(slots) : nullptr, code.rotation};
    const FloatMatrix floats = {x.in<float>(slots), Dtype::kFloat32, rows(), k(), k(), transform};
    return {floats, code.spec, code.group};
  }
};

// A weight, which is a constant, and where the products by it go.
struct LinearArgs {
  Operand out;
  bool has_bias;
  Operand bias = {};
  Activation activation;
  Operand packed;
  Weight w;

  LinearArgs(Words& words, char* const* slots, const Quantization& from)
      : out(words.written(words.matrix(Element::kFloat))), has_bias(words.take() != 0) {
    if (has_bias) bias = words.matrix(Element::kFloat);
    activation = static_cast<Activation>(words.take_int());
    packed = words.matrix(Element::kByte);
    expect_given(packed, slots);
    w = opened(packed.in<int8_t>(slots), packed.elements());
    check(from);
  }

  void check(const Quantization& from) const {
    const int64_t act = static_cast<int64_t>(activation), n = w.shape().n;
    expect(from.k() == w.shape().k && out.size(-1) == n && n > 0, "a linear of other sizes");
    expect(out.elements() / n == from.rows(), "a linear of other rows");
    expect(!has_bias || bias.elements() == n, "a bias of another size");
    expect(act >= 0 && act * kDtypes < kOutputs, "a linear of unknown kind");
    from.code.check(w);
  }

  Linear in(char* const* slots) const {
    FloatOutput to = {has_bias ? bias.in<float>(slots) : nullptr, activation, Dtype::kFloat32,
                      out.in<char>(slots)};
    to.bytes = out.elements() * to.element();
    return {w, to};
  }
};

struct Linears final : Instruction {
  Quantization from;
  std::vector<LinearArgs> all;
  const std::optional<Streaming>& how;

  Linears(Words& words, char* const* slots, const std::optional<Streaming>& how)
      : from(words), how(how) {
    const int64_t count = words.take();
    expect(count > 0, "a linear without weights");
    for (int64_t i = 0; i < count; ++i) all.emplace_back(words, slots, from);
  }

  double work() const override {
    double weights = 0;
    for (const LinearArgs& each : all) weights += static_cast<double>(each.packed.elements());
    return static_cast<double>(from.rows()) * weights;
  }

  void streamed(char* const* slots, std::vector<Streamed>* found) const override {
    for (const LinearArgs& each : all) {
      const Operand& packed = each.packed;
      found->push_back({packed.in<int8_t>(slots), packed.elements(), from.rows()});
    }
  }

  void run(const Kernels& kernels, char* const* slots) const override {
    std::vector<Linear> linears;
    linears.reserve(all.size());
    for (const LinearArgs& each : all) linears.push_back(each.in(slots));
    linears_of_floats(kernels, from.in(slots), linears, how ? &*how : nullptr);
  }
};

}  // namespace

Made linear_of(Words& words, char* const* slots, const std::optional<Streaming>& how) {
  return std::make_unique<Linears>(words, slots, how);
}

}  // namespace qfx::cpu
