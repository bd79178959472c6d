// Linears of floats that are quantized as they come: int8_linear_dynamic and lowbit_linear_dynamic.
#include "cpu/core/scratch.h"
#include "cpu/gemm/linear.h"
#include "cpu/gemm/whole.h"
#include "cpu/program/instruction.h"

namespace qfx::cpu {
namespace {

uint64_t contents_of(const PackedWeight& w) { return w.contents; }
uint64_t contents_of(const LowbitWeight& w) { return w.shape.contents; }

// What both forms are told, in this order.
struct Told {
  Operand x, out;
  bool has_bias, has_factor;
  Operand bias = {}, factor = {};
  CodeSpec spec;
  int64_t group;
  Activation activation;
  int rotation;

  explicit Told(Words& words)
      : x(words.matrix(Element::kFloat)), out(words.matrix(Element::kFloat)) {
    has_bias = words.take() != 0;
    if (has_bias) bias = words.matrix(Element::kFloat);
    has_factor = words.take() != 0;
    if (has_factor) factor = words.matrix(Element::kFloat);
    spec.bits = words.take_int();
    spec.symmetric = words.take() != 0;
    spec.per_tensor = words.take() != 0;
    group = words.take();
    activation = static_cast<Activation>(words.take_int());
    rotation = words.take_int();
  }

  void check(int64_t n, int64_t k) const {
    const bool rotates = rotation == 0 || ((rotation == 16 || rotation == 64) && k % rotation == 0);
    const int64_t act = static_cast<int64_t>(activation);
    expect(x.size(-1) == k && out.size(-1) == n && k > 0 && n > 0, "a linear of other sizes");
    expect(out.elements() / n == x.elements() / k, "a linear of other rows");
    expect(!has_bias || bias.elements() == n, "a bias of another size");
    expect(!has_factor || factor.elements() == k, "a factor of another size");
    expect(spec.bits >= 2 && spec.bits <= 8 && act >= 0 && act * kDtypes < kOutputs && rotates,
           "a linear of unknown kind");
  }

  int64_t rows() const { return x.elements() / x.size(-1); }

  FloatMatrix matrix(char* const* slots) const {
    const int64_t k = x.size(-1);
    const Transform transform = {has_factor ? factor.in<float>(slots) : nullptr, rotation};
    return {x.in<float>(slots), Dtype::kFloat32, rows(), k, k, transform};
  }

  FloatOutput output(char* const* slots) const {
    FloatOutput to = {nullptr, has_bias ? bias.in<float>(slots) : nullptr, activation,
                      Dtype::kFloat32, out.in<char>(slots)};
    to.bytes = out.elements() * to.element();
    return to;
  }
};

struct Common {
  Told told;
  Streamed weight;
  const std::optional<Streaming>& how;

  const Streaming* streaming() const { return how ? &*how : nullptr; }
};

struct AnyLinear : Instruction, Common {
  explicit AnyLinear(const Common& of) : Common(of) {}

  std::optional<Streamed> streamed() const override { return weight; }
};

struct Linear final : AnyLinear {
  Operand w_scale;
  PackedWeight w;

  Linear(const Common& of, const Operand& w_scale, const PackedWeight& w)
      : AnyLinear(of), w_scale(w_scale), w(w) {}

  void run(const Kernels& kernels, char* const* slots) const override {
    FloatOutput to = told.output(slots);
    to.w_scale = w_scale.in<float>(slots);
    thread_local Scratch scratch;
    const FloatMatrix x = told.matrix(slots);
    linear_of_rows(kernels, x, told.spec, w, to, scratch.get<float>(x.rows), streaming());
  }
};

struct LowbitLinear final : AnyLinear {
  LowbitWeight w;

  LowbitLinear(const Common& of, const LowbitWeight& w) : AnyLinear(of), w(w) {}

  void run(const Kernels& kernels, char* const* slots) const override {
    lowbit_linear_of_rows(kernels, told.matrix(slots), told.spec, told.group, w, told.output(slots),
                          streaming());
  }
};

// The weight that lies there, which is a constant, as `open` reads it.
template <typename Weight>
Weight opened(char* const* slots, const Operand& packed,
              std::string (*open)(const int8_t*, int64_t, Weight*)) {
  expect(slots[packed.slot] != nullptr, "a weight is not given when the program is made");
  Weight w;
  const int8_t* data = packed.in<int8_t>(slots);
  std::string fault = open(data, packed.elements(), &w);
  if (fault.empty()) fault = fault_at_first_use(data, packed.elements(), contents_of(w));
  if (!fault.empty()) wrong_program("a weight: " + fault);
  return w;
}

Streamed streamed_of(char* const* slots, const Operand& packed, const Told& told) {
  return {packed.in<int8_t>(slots), packed.elements(), told.rows()};
}

}  // namespace

Made linear_of(Words& words, char* const* slots, const std::optional<Streaming>& how) {
  const Told told(words);
  const Operand packed = words.matrix(Element::kByte), w_scale = words.matrix(Element::kFloat);
  const PackedWeight w = opened(slots, packed, open_packed);
  told.check(w.n, w.k);
  expect(w_scale.elements() == w.n && told.group == 0, "a linear of unknown kind");
  const Common common = {told, streamed_of(slots, packed, told), how};
  return std::make_unique<Linear>(common, w_scale, w);
}

Made lowbit_linear_of(Words& words, char* const* slots, const std::optional<Streaming>& how) {
  const Told told(words);
  const Operand packed = words.matrix(Element::kByte);
  const LowbitWeight w = opened(slots, packed, open_lowbit);
  told.check(w.shape.n, w.shape.k);
  expect(told.group == 0 || told.group == w.kind.group, "groups of another size");
  const Common common = {told, streamed_of(slots, packed, told), how};
  return std::make_unique<LowbitLinear>(common, w);
}

}  // namespace qfx::cpu
