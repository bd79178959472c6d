// Pointwise functions of float32 operands, as PyTorch defines them.
#include <cmath>

#include "cpu/program/instruction.h"
#include "cpu/program/loops.h"

namespace qfx::cpu {
namespace {

// The order of UNARY and BINARY in qfx/programs/bytecode.py.
enum class Unary : int64_t {
  kNeg,
  kAbs,
  kReciprocal,
  kSqrt,
  kRsqrt,
  kExp,
  kTanh,
  kSigmoid,
  kSilu,
  kGelu,
  kGeluTanh,
  kRelu,
  kCos,
  kSin,
  kCount
};  // clang-format would put one on each line
enum class Binary : int64_t { kAdd, kSub, kMul, kDiv, kPow, kMaximum, kMinimum, kCount };

float sigmoid(float x) { return 1.f / (1.f + std::exp(-x)); }

float gelu_tanh(float x) {
  return .5f * x * (1.f + std::tanh(.79788456080286536f * (x + .044715f * x * x * x)));
}

// NaN where one of them is.
float greater(float a, float b) { return std::isnan(a) || a > b ? a : b; }
float lesser(float a, float b) { return std::isnan(a) || a < b ? a : b; }

template <typename F>
struct Unaries final : Instruction {
  Loops<2> loops;
  F f;

  Unaries(const std::array<Operand, 2>& operands, F f) : loops(operands), f(f) {}

  double work() const override { return loops.elements(); }

  void run(const Kernels&, char* const* slots) const override {
    loops.each(slots, [&](int64_t n, const auto& stride, const auto& at) {
      float* out = reinterpret_cast<float*>(at[0]);
      const float* x = reinterpret_cast<const float*>(at[1]);
      if (stride[0] == 1 && stride[1] == 1) {
        for (int64_t i = 0; i < n; ++i) out[i] = f(x[i]);
      } else {
        for (int64_t i = 0; i < n; ++i) out[i * stride[0]] = f(x[i * stride[1]]);
      }
    });
  }
};

template <typename F>
struct Binaries final : Instruction {
  Loops<3> loops;
  F f;

  Binaries(const std::array<Operand, 3>& operands, F f) : loops(operands), f(f) {}

  double work() const override { return loops.elements(); }

  void run(const Kernels&, char* const* slots) const override {
    loops.each(slots, [&](int64_t n, const auto& stride, const auto& at) {
      float* out = reinterpret_cast<float*>(at[0]);
      const float* a = reinterpret_cast<const float*>(at[1]);
      const float* b = reinterpret_cast<const float*>(at[2]);
      if (stride[0] == 1 && stride[1] == 1 && stride[2] == 1) {
        for (int64_t i = 0; i < n; ++i) out[i] = f(a[i], b[i]);
      } else if (stride[0] == 1 && stride[1] == 1 && stride[2] == 0) {
        const float same = *b;
        for (int64_t i = 0; i < n; ++i) out[i] = f(a[i], same);
      } else {
        for (int64_t i = 0; i < n; ++i) {
          out[i * stride[0]] = f(a[i * stride[1]], b[i * stride[2]]);
        }
      }
    });
  }
};

template <typename Condition>
struct Wheres final : Instruction {
  Loops<4> loops;

  explicit Wheres(const std::array<Operand, 4>& operands) : loops(operands) {}

  double work() const override { return loops.elements(); }

  void run(const Kernels&, char* const* slots) const override {
    loops.each(slots, [&](int64_t n, const auto& stride, const auto& at) {
      float* out = reinterpret_cast<float*>(at[0]);
      const auto* condition = reinterpret_cast<const Condition*>(at[1]);
      const float* a = reinterpret_cast<const float*>(at[2]);
      const float* b = reinterpret_cast<const float*>(at[3]);
      for (int64_t i = 0; i < n; ++i) {
        out[i * stride[0]] = condition[i * stride[1]] != 0 ? a[i * stride[2]] : b[i * stride[3]];
      }
    });
  }
};

template <typename F>
Made made(const std::array<Operand, 2>& operands, F f) {
  return std::make_unique<Unaries<F>>(operands, f);
}

template <typename F>
Made made(const std::array<Operand, 3>& operands, F f) {
  return std::make_unique<Binaries<F>>(operands, f);
}

}  // namespace

Made unary_of(Words& words) {
  const int64_t which = words.take();
  const std::array<Operand, 2> operands = {words.written(words.operand(Element::kFloat)),
                                           words.operand(Element::kFloat)};
  switch (static_cast<Unary>(which)) {
    case Unary::kNeg:
      return made(operands, [](float x) { return -x; });
    case Unary::kAbs:
      return made(operands, [](float x) { return std::fabs(x); });
    case Unary::kReciprocal:
      return made(operands, [](float x) { return 1.f / x; });
    case Unary::kSqrt:
      return made(operands, [](float x) { return std::sqrt(x); });
    case Unary::kRsqrt:
      return made(operands, [](float x) { return 1.f / std::sqrt(x); });
    case Unary::kExp:
      return made(operands, [](float x) { return std::exp(x); });
    case Unary::kTanh:
      return made(operands, [](float x) { return std::tanh(x); });
    case Unary::kSigmoid:
      return made(operands, sigmoid);
    case Unary::kSilu:
      return made(operands, [](float x) { return x * sigmoid(x); });
    case Unary::kGelu:
      return made(operands,
                  [](float x) { return .5f * x * (1.f + std::erf(x * .70710678118654752f)); });
    case Unary::kGeluTanh:
      return made(operands, gelu_tanh);
    case Unary::kRelu:
      return made(operands, [](float x) { return x < 0.f ? 0.f : x; });
    case Unary::kCos:
      return made(operands, [](float x) { return std::cos(x); });
    case Unary::kSin:
      return made(operands, [](float x) { return std::sin(x); });
    case Unary::kCount:
      break;
  }
  wrong_program("no such function of one number");
}

Made binary_of(Words& words) {
  const int64_t which = words.take();
  const std::array<Operand, 3> operands = {words.written(words.operand(Element::kFloat)),
                                           words.operand(Element::kFloat),
                                           words.operand(Element::kFloat)};
  switch (static_cast<Binary>(which)) {
    case Binary::kAdd:
      return made(operands, [](float a, float b) { return a + b; });
    case Binary::kSub:
      return made(operands, [](float a, float b) { return a - b; });
    case Binary::kMul:
      return made(operands, [](float a, float b) { return a * b; });
    case Binary::kDiv:
      return made(operands, [](float a, float b) { return a / b; });
    case Binary::kPow:
      return made(operands, [](float a, float b) { return std::pow(a, b); });
    case Binary::kMaximum:
      return made(operands, greater);
    case Binary::kMinimum:
      return made(operands, lesser);
    case Binary::kCount:
      break;
  }
  wrong_program("no such function of two numbers");
}

Made where_of(Words& words) {
  const Operand out = words.written(words.operand(Element::kFloat)), condition = words.operand();
  const std::array<Operand, 4> operands = {out, condition, words.operand(Element::kFloat),
                                           words.operand(Element::kFloat)};
  if (condition.element == Element::kFloat) return std::make_unique<Wheres<float>>(operands);
  expect(condition.element == Element::kByte, "a condition of another type");
  return std::make_unique<Wheres<int8_t>>(operands);
}

}  // namespace qfx::cpu
