// quantize on the CPU: codes of an activation, in all the ways in which they are chosen.
#include <algorithm>
#include <tuple>

#include "cpu/core/parallel.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/kernels/tables/rows.h"
#include "cpu/ops/arguments.h"
#include "implement.h"

namespace qfx::cpu {
namespace {

constexpr const char* kOp = "quantize";
constexpr int64_t kStepsPerElement = 16;  // of a pass over memory, in parallel.h's unit

// Floats to quantize, and memory for what they become.
struct Job {
  const Kernels& kernels;
  FloatMatrix x;
  ActivationCode how;
  int8_t* q;
  float* scale;
  int32_t* zero;

  // f(begin, end) of rows. `steps`: of an element, in parallel.h's unit.
  template <typename F>
  void for_rows(int64_t steps, const F& f) const {
    parallel(x.rows, x.rows * x.columns * steps, f);
  }

  void store(int64_t m, const RowCode& code) const {
    scale[m] = code.scale;
    zero[m] = code.zero_point;
  }
};

// --- scales given ---

// Contiguous; `zero` is null for 0.
struct Given {
  const float* scale;
  int64_t scale_step;
  const int32_t* zero;
  int64_t zero_step;
};

void quantize_as_given(const Job& job, const Given& given) {
  const int64_t k = job.x.columns;
  const CodeSpec spec = {job.how.spec.bits, job.how.spec.symmetric, false};
  job.for_rows(kStepsPerElement, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      const int32_t zero = given.zero == nullptr ? 0 : given.zero[m * given.zero_step];
      Range range;
      const float* row = row_as_floats(job.kernels, job.x, m, &range);
      const RowCode code = given_row_code(range, spec, given.scale[m * given.scale_step], zero);
      job.kernels.row->quantize_clamped(row, k, &code, job.q + m * k);
      job.store(m, code);
    }
  });
}

// --- codes rounded at random ---

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

void quantize_at_random(const Job& job, uint64_t seed) {
  constexpr int64_t kSteps = 32;
  const CodeSpec& spec = job.how.spec;
  const int64_t k = job.x.columns;
  TensorCode shared{};
  if (spec.per_tensor) shared = choose_tensor_code(job.kernels, job.x, spec, job.scale);
  job.for_rows(kSteps, [&](int64_t begin, int64_t end) {
    RandomWindow random(job.kernels, seed);
    for (int64_t m = begin; m < end; ++m) {
      Range range;
      const float* row = row_as_floats(job.kernels, job.x, m, spec.per_tensor ? nullptr : &range);
      const RowCode code = spec.per_tensor ? shared.of(m) : code_of(range, spec);
      quantize_row(job.kernels, row, m, k, code, random, job.q + m * k);
      job.scale[m] = code.scale;
      job.zero[m] = 0;
    }
  });
}

// --- the operator ---

void check_kind(const ActivationCode& how, const std::optional<Tensor>& scale,
                const std::optional<Tensor>& zero_point, const std::optional<Tensor>& seed) {
  STD_TORCH_CHECK(scale.has_value() || !zero_point.has_value(), kOp,
                  ": zero_point is given without a scale");
  const bool apart = scale.has_value() || seed.has_value();
  STD_TORCH_CHECK(!apart || how.group == 0, kOp, ": group=", how.group,
                  ", but scales that are given and rounding at random are for whole rows");
  STD_TORCH_CHECK(!scale.has_value() || !seed.has_value(), kOp,
                  ": both a scale and a seed are given, expected one of them");
  if (!seed.has_value()) return;
  check_dtype(kOp, "seed", *seed, {ScalarType::Long});
  STD_TORCH_CHECK(seed->numel() == 1, kOp, ": seed has shape ", shape_of(*seed),
                  ", expected a single element");
  STD_TORCH_CHECK(how.spec.symmetric && how.rotation == 0, kOp,
                  ": rounding at random is for symmetric codes and no rotation");
}

std::tuple<Tensor, Tensor, Tensor> quantize(Tensor x, std::vector<int64_t> code,
                                            std::optional<Tensor> scale,
                                            std::optional<Tensor> zero_point,
                                            std::optional<Tensor> seed,
                                            std::optional<Tensor> factor) {
  check_float(kOp, "x", x);
  const ActivationCode how = activation_code_of(kOp, code);
  const Matrix size = matrix_of(kOp, "x", x);
  check_kind(how, scale, zero_point, seed);
  if (scale.has_value()) {
    check_dtype(kOp, "scale", *scale, {ScalarType::Float});
    check_per_row(kOp, "scale", *scale, size.rows);
  }
  if (zero_point.has_value()) check_zero_point(kOp, *zero_point, size.rows);
  check_cpu_transform(kOp, x, size, factor, how.rotation);
  x = made_contiguous(x);
  factor = made_contiguous(factor);
  scale = made_contiguous(scale);
  zero_point = made_contiguous(zero_point);
  const int64_t groups = how.group == 0 ? 1 : (size.columns + how.group - 1) / how.group;
  Tensor q = empty_on_cpu(with_last(x, size.columns), ScalarType::Char);
  Tensor scales = empty_on_cpu(with_last(x, groups), ScalarType::Float);
  Tensor zeros = empty_on_cpu(with_last(x, groups), ScalarType::Int);
  if (groups == 0) return {q, scales, zeros};  // of rows without number, perhaps
  const Job job = {kernels_of(current_isa()),
                   float_matrix_of(kOp, x, size, factor, how.rotation),
                   how,
                   static_cast<int8_t*>(q.mutable_data_ptr()),
                   static_cast<float*>(scales.mutable_data_ptr()),
                   static_cast<int32_t*>(zeros.mutable_data_ptr())};
  if (seed.has_value()) {
    quantize_at_random(job, *static_cast<const uint64_t*>(seed->const_data_ptr()));
  } else if (scale.has_value()) {
    const bool shifted = zero_point.has_value();
    quantize_as_given(job,
                      {floats(*scale), stride_of(*scale), shifted ? ints(*zero_point) : nullptr,
                       shifted ? stride_of(*zero_point) : 0});
  } else {
    quantize_matrix(job.kernels, job.x, how.spec, how.group, {job.q, job.scale, job.zero});
  }
  return {q, scales, zeros};
}

STABLE_TORCH_LIBRARY_IMPL(qfx, CPU, m) { implement<"quantize", &quantize>(m); }

}  // namespace
}  // namespace qfx::cpu
