#include "cpu/rnn/recurrence.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "cpu/core/parallel.h"
#include "cpu/core/scratch.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kStepsPerElement = 128;  // of the gates, in parallel.h's unit

int64_t bytes_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

class Run {
 public:
  Run(const Kernels& kernels, const RecurrentLayer& layer, const Sequence& sequence,
      float* products)
      : kernels_(kernels), layer_(layer), of_(sequence), products_(products) {}

  // The step whose rows begin at row `first` of all.
  void step(int64_t first, int64_t rows) const {
    const Transform transform = layer_.h.x.transform;
    const FloatMatrix h = {of_.h, of_.dtype, rows, size_, size_, transform};
    const FloatOutput to = {layer_.bias, Activation::kNone, Dtype::kFloat32,
                            reinterpret_cast<char*>(products_)};
    const Linear all[] = {{layer_.w, to}};
    linears_of_floats(kernels_, {h, layer_.h.spec, layer_.h.group}, all);
    parallel(rows, rows * size_ * kStepsPerElement, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) gates(first + b, b);
    });
    const int64_t row = size_ * bytes_of(of_.dtype);
    std::memcpy(of_.y + first * row, of_.h, rows * row);
  }

 private:
  // Row `b` of the state, whose products of the input are row `m` of all.
  void gates(int64_t m, int64_t b) const {
    const int64_t element = bytes_of(of_.dtype);
    char* h = of_.h + b * size_ * element;
    CellRow row = {input(m), products_ + b * width_, size_, nullptr, nullptr, of_.dtype, h};
    if (layer_.cell == RecurrentLayer::Cell::kLstm) {
      row.c = of_.c + b * size_;
      return kernels_.row->lstm(&row);
    }
    thread_local Scratch state;
    row.before = floats_of(h, of_.dtype, size_, state);
    kernels_.row->gru(&row);
  }

  const float* input(int64_t m) const {
    thread_local Scratch row;
    const char* x = static_cast<const char*>(of_.x) + m * width_ * bytes_of(of_.x_dtype);
    return floats_of(x, of_.x_dtype, width_, row);
  }

  const float* floats_of(const char* x, Dtype dtype, int64_t n, Scratch& memory) const {
    if (dtype == Dtype::kFloat32) return reinterpret_cast<const float*>(x);
    float* floats = memory.get<float>(n);
    kernels_.row->widen(x, dtype, n, floats);
    return floats;
  }

  const Kernels& kernels_;
  const RecurrentLayer& layer_;
  const Sequence& of_;
  float* const products_;  // [B, G H]
  const int64_t size_ = layer_.w.shape().k, width_ = layer_.w.shape().n;
};

}  // namespace

void recur(const Kernels& kernels, const RecurrentLayer& layer, const Sequence& sequence) {
  thread_local Scratch products;
  const auto& batch = sequence.batch;
  if (batch.empty()) return;
  const int64_t most = *std::max_element(batch.begin(), batch.end());
  const Run run(kernels, layer, sequence, products.get<float>(most * layer.w.shape().n));
  const int64_t steps = static_cast<int64_t>(batch.size());
  int64_t first = 0, all = std::accumulate(batch.begin(), batch.end(), int64_t{0});
  for (int64_t i = 0; i < steps; ++i) {
    const int64_t rows = batch[sequence.reverse ? steps - 1 - i : i];
    all -= rows;
    if (rows > 0) run.step(sequence.reverse ? all : first, rows);
    first += rows;
  }
}

}  // namespace qfx::cpu
