#include "cpu/gemm/experts.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <vector>

#include "cpu/core/parallel.h"
#include "cpu/gemm/linear_job.h"

namespace qfx::cpu {
namespace {

// Rows of one expert at a time, and those of all experts together after which no other joins them:
// what lies between the products of so many stays in the second cache.
constexpr int64_t kMostRows = 512, kEnoughRows = 128;
// Bytes of the products of tokens that wait for the sums of their slots.
constexpr int64_t kWaitingBytes = 256 << 20;
constexpr int64_t kStepsPerElement = 16;  // of a pass over memory, in parallel.h's unit

// Memory of the calling thread for so many jobs at once, reused between calls.
std::deque<GroupedMemory>& memory_for(size_t jobs) {
  thread_local std::deque<GroupedMemory> memory;
  if (memory.size() < jobs) memory.resize(jobs);
  return memory;
}

// Jobs that run together.
class Jobs {
 public:
  void add(std::unique_ptr<LinearJob> job) { jobs_.push_back(std::move(job)); }

  void run() const {
    std::vector<Meeting> meetings;
    meetings.reserve(jobs_.size());
    for (const auto& job : jobs_) meetings.push_back(job->meeting());
    for_each_panel(meetings);
  }

 private:
  std::vector<std::unique_ptr<LinearJob>> jobs_;
};

// Rows [begin, end) of those sorted by expert.
struct Piece {
  int64_t expert, begin, end;

  int64_t rows() const { return end - begin; }
};

// Pieces of at most kMostRows, of experts whose rows begin[e] to begin[e + 1] are.
std::vector<Piece> pieces_of(std::span<const int64_t> begin) {
  std::vector<Piece> pieces;
  for (size_t e = 0; e + 1 < begin.size(); ++e) {
    const int64_t rows = begin[e + 1] - begin[e], height = even_part(rows, kMostRows, 1);
    for (int64_t m = begin[e]; m < begin[e + 1]; m += height) {
      pieces.push_back({static_cast<int64_t>(e), m, std::min(m + height, begin[e + 1])});
    }
  }
  return pieces;
}

// f(pieces) for as many at a time as have enough rows.
template <typename F>
void for_each_batch(const std::vector<Piece>& pieces, const F& f) {
  for (size_t begin = 0, end = 0; begin < pieces.size(); begin = end) {
    for (int64_t rows = 0; end < pieces.size() && rows < kEnoughRows; ++end) {
      rows += pieces[end].rows();
    }
    f(std::span(pieces).subspan(begin, end - begin));
  }
}

// Where the rows of a piece go, of an output whose row 0 is that of row `first`.
FloatOutput part_of(FloatOutput to, int64_t row, int64_t n) {
  to.data += row * n * to.element();
  to.bytes = 0;
  return to;
}

// Tokens, or some of them, on their way through the experts.
class Passing {
 public:
  Passing(const Kernels& kernels, const RoutedTokens& tokens,
          std::span<const ExpertWeights> weights, int64_t first, int64_t count)
      : kernels_(kernels), tokens_(tokens), weights_(weights), first_(first), count_(count) {
    sort();
  }

  // y [rows][N], sorted by expert.
  void multiply(const MatrixCodes& codes, float* y) const {
    for_each_batch(pieces_of(begin_), [&](std::span<const Piece> some) { run(some, codes, y); });
  }

  void add_up(const float* y, int64_t n, Dtype dtype, char* out) const {
    const int64_t element = dtype == Dtype::kFloat32 ? 4 : 2;
    parallel(count_, row_.size() * n * kStepsPerElement, [&](int64_t begin, int64_t end) {
      thread_local Scratch scratch;
      float* sums = scratch.get<float>(round_up(n, kPanel));
      for (int64_t t = begin; t < end; ++t) {
        add_slots(t, y, n, sums);
        activate_row(kernels_, sums, n, Activation::kNone, dtype, out + (first_ + t) * n * element);
      }
    });
  }

 private:
  int64_t slots() const { return tokens_.slots; }

  // A counting sort: the rows of an expert are in the order of their tokens.
  void sort() {
    const int32_t* expert = tokens_.expert + first_ * slots();
    const int64_t all = count_ * slots();
    begin_.assign(weights_.size() + 1, 0);
    for (int64_t i = 0; i < all; ++i) {
      if (expert[i] >= 0) ++begin_[expert[i] + 1];
    }
    for (size_t e = 0; e < weights_.size(); ++e) begin_[e + 1] += begin_[e];
    std::vector<int64_t> next(begin_.begin(), begin_.end() - 1);
    row_.assign(all, -1);
    token_.resize(begin_.back());
    for (int64_t i = 0; i < all; ++i) {
      if (expert[i] < 0) continue;
      row_[i] = next[expert[i]]++;
      token_[row_[i]] = static_cast<int32_t>(i / slots());
    }
  }

  void run(std::span<const Piece> some, const MatrixCodes& codes, float* y) const {
    thread_local Scratch between, gated;
    const int64_t begin = some.front().begin, rows = some.back().end - begin;
    const int64_t size = weights_[some.front().expert].down.shape().k;
    const int64_t inputs = tokens_.gate.inputs(size);
    float* u = between.get<float>(rows * inputs + kPanel);
    float* h = gated.get<float>(rows * size);
    auto& memory = memory_for(some.size());
    multiply_up(some, codes, u, memory);
    multiply_down(some, u, h, y, memory);
  }

  void multiply_up(std::span<const Piece> some, const MatrixCodes& codes, float* u,
                   std::deque<GroupedMemory>& memory) const {
    thread_local Scratch scales, zeros;
    const int64_t begin = some.front().begin, rows = some.back().end - begin;
    const int64_t groups = groups_of_x();
    float* scale = scales.get<float>(rows * groups);
    int32_t* zero = zeros.get<int32_t>(rows * groups);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t from = token_[begin + r] * groups;
      std::copy_n(codes.scale + from, groups, scale + r * groups);
      std::copy_n(codes.zero + from, groups, zero + r * groups);
    }
    Jobs jobs;
    for (size_t i = 0; i < some.size(); ++i) {
      const auto& [e, first, end] = some[i];
      const ExpertWeights& w = weights_[e];
      const int64_t n = w.up.shape().n, at = first - begin, step = groups == 1 ? 0 : 1;
      const FloatOutput to = {w.up_bias, Activation::kNone, Dtype::kFloat32,
                              reinterpret_cast<char*>(u)};
      const CodesInOrder from = {codes.q,
                                 token_.data() + first,
                                 end - first,
                                 {scale + at * groups, groups, step},
                                 {zero + at * groups, groups, step},
                                 tokens_.x.spec.bits < 8};
      jobs.add(job_of_codes(kernels_, from, {w.up, part_of(to, at, n)}, memory[i]));
    }
    jobs.run();
  }

  void multiply_down(std::span<const Piece> some, const float* u, float* h, float* y,
                     std::deque<GroupedMemory>& memory) const {
    thread_local Scratch scratch;
    const int64_t begin = some.front().begin, rows = some.back().end - begin;
    float* scales = scratch.get<float>(rows);
    std::vector<std::unique_ptr<LinearJob>> jobs;
    std::vector<std::unique_ptr<GatedRows>> gates;
    std::vector<Meeting> meetings;
    for (size_t i = 0; i < some.size(); ++i) {
      const auto& [e, first, end] = some[i];
      const ExpertWeights& w = weights_[e];
      const int64_t at = first - begin, n = w.down.shape().n, size = w.down.shape().k;
      const FloatMatrix x = {h + at * size, Dtype::kFloat32,  end - first, size,
                             size,          tokens_.transform};
      const FloatOutput to = {w.down_bias, Activation::kNone, Dtype::kFloat32,
                              reinterpret_cast<char*>(y)};
      const FloatsOfJob from = {{x, tokens_.spec, tokens_.group}, nullptr, scales + at};
      jobs.push_back(job_of_floats(kernels_, from, {w.down, part_of(to, first, n)}, memory[i]));
      const auto [codes, columns] = jobs.back()->meeting();
      gates.push_back(std::make_unique<GatedRows>(
          kernels_, codes, tokens_.gate, u + at * tokens_.gate.inputs(size), h + at * size, size));
      meetings.push_back({*gates.back(), columns});
    }
    for_each_panel(meetings);
  }

  int64_t groups_of_x() const {
    const auto& [x, spec, group] = tokens_.x;
    return group == 0 ? 1 : (x.columns + group - 1) / group;
  }

  void add_slots(int64_t t, const float* y, int64_t n, float* sums) const {
    std::fill_n(sums, n, 0.f);
    for (int64_t s = 0; s < slots(); ++s) {
      const int64_t row = row_[t * slots() + s];
      if (row < 0) continue;
      const float weight = tokens_.weight[(first_ + t) * slots() + s];
      for (int64_t i = 0; i < n; ++i) sums[i] += weight * y[row * n + i];
    }
  }

  const Kernels& kernels_;
  const RoutedTokens& tokens_;
  const std::span<const ExpertWeights> weights_;
  const int64_t first_, count_;
  std::vector<int64_t> begin_;  // of the rows of each expert
  std::vector<int64_t> row_;    // of each slot of each token, or -1
  std::vector<int32_t> token_;  // of each row
};

}  // namespace

UsedExperts used_experts(std::span<const int64_t> expert, int64_t count) {
  const auto exists = [&](int64_t e) { return e >= 0 && e < count; };
  std::vector<int32_t> place_of(count, -1);
  for (const int64_t e : expert) {
    if (exists(e)) place_of[e] = 0;
  }
  UsedExperts used;
  for (int64_t e = 0; e < count; ++e) {
    if (place_of[e] < 0) continue;
    place_of[e] = static_cast<int32_t>(used.number.size());
    used.number.push_back(e);
  }
  used.place.reserve(expert.size());
  for (const int64_t e : expert) used.place.push_back(exists(e) ? place_of[e] : -1);
  return used;
}

void linear_of_experts(const Kernels& kernels, const QuantizedFloats& from,
                       std::span<const ExpertRows> experts) {
  thread_local Scratch scratch;
  const FloatMatrix& x = from.x;
  float* scales = scratch.get<float>(std::max<int64_t>(x.rows, 1));
  const bool per_tensor = from.spec.per_tensor && from.group == 0;
  TensorCode shared{};
  if (per_tensor) shared = choose_tensor_code(kernels, x, from.spec, scales);
  std::vector<int64_t> begin;
  for (const ExpertRows& each : experts) begin.push_back(each.begin);
  if (!experts.empty()) begin.push_back(experts.back().end);
  for_each_batch(pieces_of(begin), [&](std::span<const Piece> some) {
    auto& memory = memory_for(some.size());
    std::deque<TensorCode> codes;
    Jobs jobs;
    for (size_t i = 0; i < some.size(); ++i) {
      const auto& [e, first, end] = some[i];
      const auto& [w, to] = experts[e].linear;
      const TensorCode* code = per_tensor ? &codes.emplace_back(shared.part(first)) : nullptr;
      const QuantizedFloats rows = {x.part(first, end - first), from.spec, from.group};
      const Linear linear = {w, part_of(to, first, w.shape().n)};
      jobs.add(job_of_floats(kernels, {rows, code, scales + first}, linear, memory[i]));
    }
    jobs.run();
  });
}

void experts(const Kernels& kernels, const RoutedTokens& tokens,
             std::span<const ExpertWeights> weights, Dtype dtype, char* out) {
  thread_local Scratch waiting, codes, scales, zeros;
  const auto& [x, spec, group] = tokens.x;
  const int64_t groups = group == 0 ? 1 : (x.columns + group - 1) / group;
  const MatrixCodes all = {codes.get<int8_t>(x.rows * x.columns),
                           scales.get<float>(x.rows * groups), zeros.get<int32_t>(x.rows * groups)};
  quantize_matrix(kernels, x, spec, group, all);
  const int64_t n = tokens.n;
  const int64_t bytes = std::max<int64_t>(tokens.slots * n * 4, 1);
  const int64_t step = std::max<int64_t>(kWaitingBytes / bytes, 1);
  for (int64_t first = 0; first < x.rows; first += step) {
    const int64_t count = std::min(step, x.rows - first);
    const MatrixCodes part = {all.q + first * x.columns, all.scale + first * groups,
                              all.zero + first * groups};
    float* y = waiting.get<float>(count * tokens.slots * n);
    const Passing passing(kernels, tokens, weights, first, count);
    passing.multiply(part, y);
    passing.add_up(y, n, dtype, out);
  }
}

}  // namespace qfx::cpu
