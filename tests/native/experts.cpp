// Blocks of experts on one thread and on several, against their experts one by one (X2); and the
// shares of products of different sizes.
#include "cpu/gemm/experts.h"

#include <algorithm>
#include <memory>

#include "cpu/gemm/cost_shares.h"
#include "cpu/gemm/weight.h"
#include "harness.h"
#include "threads.h"

namespace qfx::test {
namespace {

constexpr int64_t kThreads[] = {1, 2, 5};
constexpr CodeSpec kSpec = {8, false, false};
constexpr struct {
  int64_t tokens, slots, experts, k, size, n, group;
} kShapes[] = {{1, 2, 3, 64, 32, 33, 0},    {0, 2, 3, 64, 32, 33, 0},   {7, 3, 5, 100, 40, 70, 64},
               {40, 2, 2, 192, 64, 32, 0},  {300, 1, 1, 33, 31, 17, 0}, {150, 4, 9, 64, 64, 64, 64},
               {700, 2, 4, 32, 64, 128, 0}, {5, 1, 2, 0, 32, 8, 0}};

float value_of(int64_t i) { return static_cast<float>(hash(i) % 2001) * 0x1p-10f - 1.f; }

std::vector<float> values(int64_t count, int64_t from) {
  std::vector<float> made;
  for (int64_t i = 0; i < count; ++i) made.push_back(value_of(i + from));
  return made;
}

// A packed weight between guards.
struct Packed {
  Pages pages;
  Weight weight;

  Packed(int64_t n, int64_t k, int64_t group, int64_t seed) {
    std::vector<int8_t> codes;
    for (int64_t i = 0; i < n * k; ++i) codes.push_back(static_cast<int8_t>(hash(i + seed)));
    const PackedKind kind = {group, group != 0, false};
    const std::vector<float> scale = values(n * kind.scales(k), seed);
    const int64_t size = packed_size(n, k, kind);
    int8_t* data = pages.get<int8_t>(size, Place::kBeforeGuard);
    pack({codes.data(), n, k, k, 1, scale.data()}, kind, data);
    if (const std::string fault = open_weight(data, size, &weight); !fault.empty()) {
      throw Failure(fault);
    }
  }
};

using Experts = std::vector<std::unique_ptr<Packed>>;

// A block, and what it gives.
class BlockTest {
 public:
  explicit BlockTest(const Kernels& kernels)
      : kernels_(kernels), subject_(std::string("experts__") + kernels.isa) {}

  template <typename Shape>
  void run(const Shape& s, Gate::Order order) {
    const Gate gate = {Activation::kRelu, order, 0.75f, 0.5f};
    Experts up, down;
    std::vector<ExpertWeights> weights;
    const std::vector<float> bias = values(std::max(gate.inputs(s.size), s.n), 5);
    for (int64_t e = 0; e < s.experts; ++e) {
      up.push_back(std::make_unique<Packed>(gate.inputs(s.size), s.k, s.group, 100 * e));
      down.push_back(std::make_unique<Packed>(s.n, s.size, s.group, 100 * e + 50));
      weights.push_back(
          {up[e]->weight, down[e]->weight, bias.data(), e % 2 ? bias.data() : nullptr});
    }
    const std::vector<float> x = values(s.tokens * s.k, 1), routing = values(s.tokens * s.slots, 2);
    std::vector<int32_t> expert;
    for (int64_t i = 0; i < s.tokens * s.slots; ++i) {
      expert.push_back(static_cast<int32_t>(hash(i) % (s.experts + 1)) - 1);
    }
    const float* data = x_.copy(x, Place::kBeforeGuard);
    const RoutedTokens tokens = {{matrix(data, s.tokens, s.k), kSpec, 0},
                                 s.slots,
                                 expert_.copy(expert, Place::kBeforeGuard),
                                 routing_.copy(routing, Place::kBeforeGuard),
                                 gate,
                                 kSpec,
                                 0,
                                 {},
                                 s.n};
    cpu::test_threads = 1;
    const std::vector<float> expected = one_by_one(tokens, weights);
    for (int64_t threads : kThreads) {
      subject_.begin(std::to_string(s.tokens) + " tokens to " + std::to_string(s.slots) + " of " +
                     std::to_string(s.experts) + " experts, " + std::to_string(threads) +
                     " threads");
      cpu::test_threads = threads;
      float* found = y_.get<float>(s.tokens * s.n, Place::kBeforeGuard);
      experts(kernels_, tokens, weights, Dtype::kFloat32, reinterpret_cast<char*>(found));
      subject_.same(found, expected.data(), s.tokens * s.n);
    }
    cpu::test_threads = 1;
  }

  void passed() const { subject_.passed(); }

 private:
  static FloatMatrix matrix(const float* x, int64_t rows, int64_t k) {
    return {x, Dtype::kFloat32, rows, k};
  }

  std::vector<float> linear(const float* x, int64_t k, const Weight& w, const float* bias) const {
    std::vector<float> y(static_cast<size_t>(w.shape().n));
    const cpu::Linear all[] = {
        {w, {bias, Activation::kNone, Dtype::kFloat32, reinterpret_cast<char*>(y.data())}}};
    linears_of_floats(kernels_, {matrix(x, 1, k), kSpec, 0}, all);
    return y;
  }

  std::vector<float> one_by_one(const RoutedTokens& t, const std::vector<ExpertWeights>& w) const {
    const FloatMatrix& x = t.x.x;
    std::vector<float> sums(static_cast<size_t>(x.rows * t.n), 0.f);
    for (int64_t i = 0; i < x.rows * t.slots; ++i) {
      if (t.expert[i] < 0) continue;
      const ExpertWeights& e = w[t.expert[i]];
      const int64_t m = i / t.slots;
      const float* row = static_cast<const float*>(x.data) + m * x.columns;
      const std::vector<float> u = linear(row, x.columns, e.up, e.up_bias);
      const std::vector<float> h = gated(u, t.gate, e.down.shape().k);
      const std::vector<float> y = linear(h.data(), e.down.shape().k, e.down, e.down_bias);
      for (int64_t n = 0; n < t.n; ++n) sums[m * t.n + n] += t.weight[i] * y[n];
    }
    return sums;
  }

  static std::vector<float> gated(const std::vector<float>& u, const Gate& gate, int64_t size) {
    std::vector<float> h;
    for (int64_t i = 0; i < size; ++i) {
      const bool mixed = gate.order == Gate::Order::kInterleaved;
      const float g = std::max(std::min(u[mixed ? 2 * i : i], gate.limit), 0.f);
      if (gate.order == Gate::Order::kNone) {
        h.push_back(g);
      } else {
        const float v = u[mixed ? 2 * i + 1 : size + i];
        h.push_back(g * (std::max(std::min(v, gate.limit), -gate.limit) + gate.shift));
      }
    }
    return h;
  }

  const Kernels& kernels_;
  Subject subject_;
  Pages x_, expert_, routing_, y_;
};

// Each panel of each product is in one share.
void check_shares(Subject& subject) {
  for (int64_t shares : {1, 2, 3, 7, 96}) {
    for (int64_t count : {0, 1, 5, 40}) {
      subject.begin(std::to_string(count) + " products, " + std::to_string(shares) + " shares");
      CostShares line;
      std::vector<int64_t> first;
      int64_t panels = 0;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t own = 1 + hash(i) % 50, cost = 1 + hash(i + 99) % 1000;
        line.add(i, {0, 1}, own, cost);
        first.push_back(panels);
        panels += own;
      }
      std::vector<int32_t> seen(static_cast<size_t>(panels), 0);
      const std::vector<int32_t> once(static_cast<size_t>(panels), 1);
      for (int64_t i = 0; i < shares; ++i) {
        line.for_each_task(i, shares, [&](const Task& task) {
          for (int64_t p = task.panel_begin; p < task.panel_end; ++p)
            ++seen[first[task.product] + p];
        });
      }
      subject.same(seen.data(), once.data(), panels);
    }
  }
}

}  // namespace

void check_experts(const Kernels& kernels) {
  Subject shares("shares of experts");
  check_shares(shares);
  BlockTest test(kernels);
  for (const auto& shape : kShapes) {
    for (Gate::Order order :
         {Gate::Order::kNone, Gate::Order::kHalves, Gate::Order::kInterleaved}) {
      test.run(shape, order);
    }
  }
  test.passed();
}

}  // namespace qfx::test
