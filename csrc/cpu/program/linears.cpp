// Linears of floats that are quantized as they come: int8_linear_dynamic and lowbit_linear_dynamic.
#include "cpu/core/scratch.h"
#include "cpu/gemm/linear.h"
#include "cpu/gemm/whole.h"
#include "cpu/program/instruction.h"

namespace qfx::cpu {
namespace {

uint64_t contents_of(const PackedWeight& w) { return w.contents; }
uint64_t contents_of(const LowbitWeight& w) { return w.shape.contents; }

// Floats that are quantized once, for all weights that they meet.
struct Quantized {
  Operand x;
  bool has_factor;
  Operand factor = {};
  CodeSpec spec;
  int64_t group;
  int rotation;

  explicit Quantized(Words& words)
      : x(words.matrix(Element::kFloat)), has_factor(words.take() != 0) {
    if (has_factor) factor = words.matrix(Element::kFloat);
    spec.bits = words.take_int();
    spec.symmetric = words.take() != 0;
    spec.per_tensor = words.take() != 0;
    group = words.take();
    rotation = words.take_int();
    const bool rotates =
        rotation == 0 || ((rotation == 16 || rotation == 64) && k() % rotation == 0);
    expect(k() > 0 && (!has_factor || factor.elements() == k()), "a factor of another size");
    expect(spec.bits >= 2 && spec.bits <= 8 && rotates, "a linear of unknown kind");
  }

  int64_t k() const { return x.size(-1); }
  int64_t rows() const { return x.elements() / k(); }

  FloatMatrix matrix(char* const* slots) const {
    const Transform transform = {has_factor ? factor.in<float>(slots) : nullptr, rotation};
    return {x.in<float>(slots), Dtype::kFloat32, rows(), k(), k(), transform};
  }
};

// Where the products by a weight go, and the weight as it lies.
struct Told {
  Operand out;
  bool has_bias;
  Operand bias = {};
  Activation activation;
  Operand packed;

  explicit Told(Words& words)
      : out(words.written(words.matrix(Element::kFloat))), has_bias(words.take() != 0) {
    if (has_bias) bias = words.matrix(Element::kFloat);
    activation = static_cast<Activation>(words.take_int());
    packed = words.matrix(Element::kByte);
  }

  void check(const Quantized& from, int64_t n, int64_t k) const {
    const int64_t act = static_cast<int64_t>(activation);
    expect(from.k() == k && out.size(-1) == n && n > 0, "a linear of other sizes");
    expect(out.elements() / n == from.rows(), "a linear of other rows");
    expect(!has_bias || bias.elements() == n, "a bias of another size");
    expect(act >= 0 && act * kDtypes < kOutputs, "a linear of unknown kind");
  }

  FloatOutput output(char* const* slots) const {
    FloatOutput to = {nullptr, has_bias ? bias.in<float>(slots) : nullptr, activation,
                      Dtype::kFloat32, out.in<char>(slots)};
    to.bytes = out.elements() * to.element();
    return to;
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

// One of int8.
struct WholeTold : Told {
  Operand w_scale;
  PackedWeight w;

  WholeTold(Words& words, char* const* slots, const Quantized& from)
      : Told(words), w_scale(words.matrix(Element::kFloat)), w(opened(slots, packed, open_packed)) {
    check(from, w.n, w.k);
    expect(w_scale.elements() == w.n && from.group == 0, "a linear of unknown kind");
  }

  Linear in(char* const* slots) const {
    Linear made = {w, output(slots)};
    made.to.w_scale = w_scale.in<float>(slots);
    return made;
  }
};

// One of few bits.
struct LowbitTold : Told {
  LowbitWeight w;

  LowbitTold(Words& words, char* const* slots, const Quantized& from)
      : Told(words), w(opened(slots, packed, open_lowbit)) {
    check(from, w.shape.n, w.shape.k);
    expect(from.group == 0 || from.group == w.kind.group, "groups of another size");
  }

  LowbitLinear in(char* const* slots) const { return {w, output(slots)}; }
};

void multiply(const Kernels& kernels, const FloatMatrix& x, const Quantized& from,
              std::span<const Linear> all, const Streaming* how) {
  thread_local Scratch scratch;
  linears_of_rows(kernels, x, from.spec, all, scratch.get<float>(x.rows), how);
}

void multiply(const Kernels& kernels, const FloatMatrix& x, const Quantized& from,
              std::span<const LowbitLinear> all, const Streaming* how) {
  lowbit_linears_of_rows(kernels, x, from.spec, from.group, all, how);
}

template <typename Each>
struct Linears final : Instruction {
  Quantized from;
  std::vector<Each> all;
  const std::optional<Streaming>& how;

  Linears(Words& words, char* const* slots, const std::optional<Streaming>& how)
      : from(words), how(how) {
    const int64_t count = words.take();
    expect(count > 0, "a linear without weights");
    for (int64_t i = 0; i < count; ++i) all.emplace_back(words, slots, from);
  }

  double work() const override {
    double weights = 0;
    for (const Each& each : all) weights += static_cast<double>(each.packed.elements());
    return static_cast<double>(from.rows()) * weights;
  }

  void streamed(char* const* slots, std::vector<Streamed>* found) const override {
    for (const Each& each : all) {
      const Operand& packed = each.packed;
      found->push_back({packed.in<int8_t>(slots), packed.elements(), from.rows()});
    }
  }

  void run(const Kernels& kernels, char* const* slots) const override {
    std::vector<decltype(all[0].in(slots))> linears;
    linears.reserve(all.size());
    for (const Each& each : all) linears.push_back(each.in(slots));
    multiply(kernels, from.matrix(slots), from, linears, how ? &*how : nullptr);
  }
};

}  // namespace

Made linear_of(Words& words, char* const* slots, const std::optional<Streaming>& how) {
  return std::make_unique<Linears<WholeTold>>(words, slots, how);
}

Made lowbit_linear_of(Words& words, char* const* slots, const std::optional<Streaming>& how) {
  return std::make_unique<Linears<LowbitTold>>(words, slots, how);
}

}  // namespace qfx::cpu
