// quantize_stochastic on the CPU.
#include <algorithm>
#include <tuple>

#include "cpu/core/parallel.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/kernels/tables/rows.h"
#include "cpu/ops/arguments.h"
#include "implement.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kStepsPerElement = 32;  // of a pass over memory, in parallel.h's unit

// The random bits of consecutive elements, made a window at a time.
class RandomWindow {
 public:
  RandomWindow(const Kernels& kernels, uint64_t seed) : kernels_(kernels), seed_(seed) {}

  // Those of elements i, i + 1, ..., i + count - 1; writes count >= 1.
  const uint16_t* at(int64_t i, int64_t* count) {
    const int64_t window = i / kElements;
    if (window != made_) {
      kernels_.row->random(seed_, window * kGroups, kGroups, bits_);
      made_ = window;
    }
    *count = (window + 1) * kElements - i;
    return bits_ + i % kElements;
  }

 private:
  static constexpr int64_t kGroups = 8, kElements = kGroups * kRandomGroup;
  const Kernels& kernels_;
  uint64_t seed_;
  int64_t made_ = -1;
  alignas(64) uint16_t bits_[kElements];
};

// Codes of row m of a matrix. Random bits belong to an element's place in all of it, so they depend
// on neither threads nor instruction set.
void quantize_row(const Kernels& kernels, const float* row, int64_t m, int64_t columns,
                  const RowCode& code, RandomWindow& random, int8_t* q) {
  for (int64_t k = 0; k < columns;) {
    int64_t count;
    const uint16_t* bits = random.at(m * columns + k, &count);
    count = std::min(count, columns - k);
    kernels.row->quantize_stochastic(row + k, count, &code, bits, q + k);
    k += count;
  }
}

uint64_t seed_of(const char* op, const Tensor& seed) {
  check_dtype(op, "seed", seed, {ScalarType::Long});
  STD_TORCH_CHECK(seed.numel() == 1, op, ": seed has shape ", shape_of(seed),
                  ", expected a single element");
  return static_cast<uint64_t>(*static_cast<const int64_t*>(seed.const_data_ptr()));
}

std::tuple<Tensor, Tensor, Tensor> quantize_stochastic(Tensor x, Tensor seed,
                                                       std::vector<int64_t> axes, int64_t bits,
                                                       std::optional<Tensor> factor) {
  constexpr const char* op = "quantize_stochastic";
  check_float(op, "x", x);
  const uint64_t key = seed_of(op, seed);
  const Matrix size = matrix_of(op, "x", x);
  const CodeSpec spec = code_spec_of(op, axes, bits, true);
  check_cpu_transform(op, x, size, factor, 0);
  x = made_contiguous(x);
  factor = made_contiguous(factor);
  const FloatMatrix matrix = float_matrix_of(op, x, size, factor, 0);
  Tensor q = empty_on_cpu(with_last(x, size.columns), ScalarType::Char);
  const std::vector<int64_t> shape = with_last(x, 1);
  Tensor scale = empty_on_cpu(shape, ScalarType::Float);
  Tensor zero_point = empty_on_cpu(shape, ScalarType::Int);
  int32_t* zeros = static_cast<int32_t*>(zero_point.mutable_data_ptr());
  std::fill(zeros, zeros + zero_point.numel(), 0);

  const Kernels& kernels = kernels_of(current_isa());
  int8_t* codes = static_cast<int8_t*>(q.mutable_data_ptr());
  float* scales = static_cast<float*>(scale.mutable_data_ptr());
  TensorCode shared{};
  if (spec.per_tensor) shared = choose_tensor_code(kernels, matrix, spec, scales);
  parallel(size.rows, size.rows * size.columns * kStepsPerElement, [&](int64_t begin, int64_t end) {
    RandomWindow random(kernels, key);
    for (int64_t m = begin; m < end; ++m) {
      Range range;
      const float* row = row_as_floats(kernels, matrix, m, spec.per_tensor ? nullptr : &range);
      const RowCode code = spec.per_tensor ? shared.of(m) : code_of(range, spec);
      quantize_row(kernels, row, m, size.columns, code, random, codes + m * size.columns);
      scales[m] = code.scale;
    }
  });
  return {q, scale, zero_point};
}

STABLE_TORCH_LIBRARY_IMPL(qfx, CPU, m) {
  implement<"quantize_stochastic", &quantize_stochastic>(m);
}

}  // namespace
}  // namespace qfx::cpu
