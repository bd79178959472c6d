// Blocks of experts of a mixture. (X2)
#include "cpu/gemm/experts.h"

#include <limits>

#include "cpu/core/scratch.h"
#include "cpu/program/instruction.h"
#include "cpu/program/weights.h"

namespace qfx::cpu {
namespace {

Gate gate_of(Words& words) {
  const int64_t activation = words.take(), order = words.take();
  expect(activation >= 0 && activation < kOutputs / kDtypes, "a gate of unknown kind");
  expect(order >= 0 && order <= static_cast<int64_t>(Gate::Order::kInterleaved),
         "a gate of unknown kind");
  const float limit = words.take_float(), shift = words.take_float();
  expect(limit >= 0.f, "a gate with a limit below 0");
  return {static_cast<Activation>(activation), static_cast<Gate::Order>(order),
          limit == 0.f ? std::numeric_limits<float>::infinity() : limit, shift};
}

// The weight of each expert, all [n, k], constants that lie one after the other, and their biases.
struct Stack {
  Operand packed;
  bool has_bias;
  Operand bias = {};
  std::vector<Weight> weights;

  Stack(Words& words, char* const* slots, const RowsCode& code)
      : packed(words.matrix(Element::kByte)), has_bias(words.take() != 0) {
    if (has_bias) bias = words.matrix(Element::kFloat);
    expect(packed.axes == 2 && packed.size(0) > 0 && packed.size(1) > 0, "a stack of no weights");
    expect_given(packed, slots);
    for (int64_t e = 0; e < packed.size(0); ++e) {
      weights.push_back(opened(packed.in<int8_t>(slots) + e * bytes(), bytes()));
      const bool same = weights[e].shape().n == n() && weights[e].shape().k == k();
      expect(same && n() > 0 && k() > 0, "experts of different sizes");
      code.check(weights[e]);
    }
    expect(!has_bias || bias.elements() == experts() * n(), "a bias of another size");
  }

  int64_t experts() const { return packed.size(0); }
  int64_t bytes() const { return packed.size(1); }
  int64_t n() const { return weights[0].shape().n; }
  int64_t k() const { return weights[0].shape().k; }
  const float* bias_of(int64_t e, char* const* slots) const {
    return has_bias ? bias.in<float>(slots) + e * n() : nullptr;
  }
};

struct Experts final : Instruction {
  Operand out, x, expert, routing;
  RowsCode code;
  Gate gate;
  Stack up;
  RowsCode down_code;
  Stack down;

  Experts(Words& words, char* const* slots)
      : out(words.written(words.matrix(Element::kFloat))),
        x(words.matrix(Element::kFloat)),
        expert(words.matrix(Element::kLong)),
        routing(words.matrix(Element::kFloat)),
        code(words, x.size(-1)),
        gate(gate_of(words)),
        up(words, slots, code),
        down_code(words, between()),
        down(words, slots, down_code) {
    const int64_t tokens = x.elements() / x.size(-1);
    expect(up.k() == x.size(-1) && up.n() == gate.inputs(between()) && down.k() == between() &&
               down.experts() == up.experts() && down.n() == out.size(-1),
           "experts of other sizes");
    expect(out.elements() == tokens * down.n(), "experts of other rows");
    expect(expert.axes == 2 && routing.axes == 2 && expert.size(0) == tokens &&
               routing.size(0) == tokens && expert.size(1) == routing.size(1),
           "slots of other tokens");
    const bool by_row = !down_code.spec.per_tensor || down_code.group != 0;
    expect(by_row, "rows of an expert with one scale for all");
  }

  int64_t between() const { return gate.order == Gate::Order::kNone ? up.n() : up.n() / 2; }

  double work() const override {
    return static_cast<double>(expert.elements()) * static_cast<double>(up.bytes() + down.bytes());
  }

  void run(const Kernels& kernels, char* const* slots) const override {
    const std::span ids(expert.in<const int64_t>(slots), static_cast<size_t>(expert.elements()));
    for (const int64_t e : ids) {
      if (e < 0) throw std::out_of_range("a slot has expert " + std::to_string(e));
    }
    const UsedExperts used = used_experts(ids, up.experts());
    std::vector<ExpertWeights> weights;
    weights.reserve(used.number.size());
    for (const int64_t e : used.number) {
      weights.push_back(
          {up.weights[e], down.weights[e], up.bias_of(e, slots), down.bias_of(e, slots)});
    }
    const int64_t k = x.size(-1);
    const FloatMatrix floats = {x.in<float>(slots),      Dtype::kFloat32, x.elements() / k, k, k,
                                {nullptr, code.rotation}};
    const RoutedTokens tokens = {{floats, code.spec, code.group},
                                 expert.size(1),
                                 used.place.data(),
                                 routing.in<float>(slots),
                                 gate,
                                 down_code.spec,
                                 down_code.group,
                                 {nullptr, down_code.rotation},
                                 down.n()};
    experts(kernels, tokens, weights, Dtype::kFloat32, out.in<char>(slots));
  }
};

}  // namespace

Made experts_of(Words& words, char* const* slots) {
  return std::make_unique<Experts>(words, slots);
}

}  // namespace qfx::cpu
