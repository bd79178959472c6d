// int8_bmm, int8_bmm_dynamic on the CPU: products of two computed operands. b, which takes the
// place of the weight, is packed on the way.
#include <algorithm>
#include <deque>
#include <memory>
#include <vector>

#include "batch.h"
#include "cpu/core/parallel.h"
#include "cpu/core/scratch.h"
#include "cpu/gemm/pack_floats.h"
#include "cpu/gemm/product.h"
#include "cpu/gemm/weight.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/ops/arguments.h"
#include "cpu/ops/matrices.h"
#include "implement.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kStepsPerElement = 32;  // of quantizing and packing, in parallel.h's unit

// What one product of the batch takes, in parallel.h's unit.
int64_t work_of(const Kernels& kernels, const BatchSizes& size) {
  const Format& format = format_for(kernels, Operands::kWide, size.m);
  return work_of(tuning_of(format), size.m * size.n * size.k) +
         (size.m + size.n) * size.k * kStepsPerElement;
}

// whole(i) for some of the batch, and jointly(first, count) for what is left of it.
template <typename F, typename G>
void for_each_product(const Kernels& kernels, const BatchSizes& size, int64_t work, const F& whole,
                      const G& jointly) {
  const int64_t wholes = whole_products(size.batch, work, threads_here()),
                rest = size.batch - wholes;
  parallel(wholes, wholes * work, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) whole(i);
  });
  PackedWeight w = {};
  w.padded_k = padded_k(size.k);
  const bool fits = size.m <= rows_at_once(kernels, w, size.m);
  if (rest > 0 && fits) return jointly(wholes, rest);
  for (int64_t i = wholes; i < size.batch; ++i) whole(i);  // on all threads, some rows at a time
}

// Codes b[n][k], packed panel by panel.
struct CodePanels final : PanelSource {
  const int8_t* b;
  int64_t row_stride, column_stride;
  int32_t* colsum;
  int8_t* blocks;

  CodePanels(const Matrices& all, int64_t i, int64_t n, int64_t k, PackMemory& memory)
      : PanelSource({n, k, padded_k(k), false, nullptr, nullptr}),
        b(reinterpret_cast<const int8_t*>(all[i])),
        row_stride(all.row_stride),
        column_stride(all.column_stride),
        colsum(memory.colsums.get<int32_t>(round_up(n, kPanel))),
        blocks(memory.blocks.get<int8_t>(round_up(n, kPanel) * padded_k(k))) {
    weight.colsum = colsum;
    weight.blocks = blocks;
  }

  void fill(int64_t begin, int64_t end) const override {
    for (int64_t p = begin; p < end; ++p) {
      pack_panel(b + p * kPanel * row_stride, columns_of(weight, p), weight.k, row_stride,
                 column_stride, colsum + p * kPanel, blocks + p * kPanel * weight.padded_k);
    }
  }
};

// What holds the operands of products that are computed jointly, until the next ones.
struct JointMemory {
  PackMemory panels;
  RowsMemory rows;
};

JointMemory& joint_memory(int64_t i) {
  thread_local std::vector<std::unique_ptr<JointMemory>> all;
  while (static_cast<int64_t>(all.size()) <= i) all.push_back(std::make_unique<JointMemory>());
  return *all[i];
}

// Operands and sinks of products, which refer to one another and so stay where they are.
template <typename Panels, typename Source, typename Sink>
struct Joint {
  std::deque<Panels> panels;
  std::deque<Source> rows;
  std::deque<Sink> sinks;
  std::deque<FloatOutput> outputs;

  void run(int64_t work) const {
    std::vector<Pairing> batch;
    for (size_t i = 0; i < rows.size(); ++i) batch.push_back({rows[i], panels[i], sinks[i]});
    gemm(batch, threads_for(static_cast<int64_t>(batch.size()) * work));
  }
};

Tensor int8_bmm(Tensor a_q, Tensor a_zero_point, Tensor b_q) {
  constexpr const char* op = "int8_bmm";
  check_dtype(op, "a_q", a_q, {ScalarType::Char});
  check_dtype(op, "b_q", b_q, {ScalarType::Char});
  const BatchSizes size = batch_sizes_of(op, "a_q", a_q, "b_q", b_q);
  check_zero_point(op, a_zero_point, size.batch * size.m);
  a_q = made_contiguous(a_q);
  a_zero_point = made_contiguous(a_zero_point);
  Tensor acc = empty_on_cpu(with_last(a_q, size.n), ScalarType::Int);
  if (acc.numel() == 0) return acc;  // of matrices without number, perhaps
  const Kernels& kernels = kernels_of(current_isa());
  const int8_t* a = static_cast<const int8_t*>(a_q.const_data_ptr());
  const Matrices b(b_q);
  const int64_t step = stride_of(a_zero_point), bytes = packed_size(size.n, size.k);
  const int64_t work = work_of(kernels, size);
  int32_t* out = static_cast<int32_t*>(acc.mutable_data_ptr());
  const auto whole = [&](int64_t i) {
    thread_local Scratch scratch;
    int8_t* packed = scratch.get<int8_t>(bytes);
    const int8_t* codes = reinterpret_cast<const int8_t*>(b[i]);
    pack({codes, size.n, size.k, b.row_stride, b.column_stride}, {}, packed);
    Weight opened;
    open_weight(packed, bytes, &opened);
    const PackedWeight& w = opened.whole;
    in_chunks(kernels, w, size.m, [&](int64_t first, int64_t count) {
      const int64_t row = i * size.m + first;
      const int32_t* zeros = ints(a_zero_point) + row * step;
      const CodeRows from(kernels, w, a + row * size.k, zeros, step, count);
      gemm(from, w, IntegerSink(w, from.rows, out + row * size.n));
    });
  };
  const auto jointly = [&](int64_t first, int64_t count) {
    Joint<CodePanels, CodeRows, IntegerSink> joint;
    for (int64_t i = first; i < first + count; ++i) {
      JointMemory& memory = joint_memory(i - first);
      const int64_t row = i * size.m;
      const auto& w = joint.panels.emplace_back(b, i, size.n, size.k, memory.panels).weight;
      const CodeRows& from = joint.rows.emplace_back(
          kernels, w, a + row * size.k, ints(a_zero_point) + row * step, step, size.m, memory.rows);
      joint.sinks.emplace_back(w, from.rows, out + row * size.n);
    }
    joint.run(work);
  };
  for_each_product(kernels, size, work, whole, jointly);
  return acc;
}

Tensor with_contiguous_rows_or_columns(const Tensor& t) {
  return t.stride(t.dim() - 2) == 1 ? t : with_contiguous_rows(t);
}

Tensor int8_bmm_dynamic(Tensor a, Tensor b, std::vector<int64_t> axes, int64_t bits, bool symmetric,
                        int64_t b_bits, ScalarType out_dtype) {
  constexpr const char* op = "int8_bmm_dynamic";
  check_float(op, "a", a);
  check_float(op, "b", b);
  const BatchSizes size = batch_sizes_of(op, "a", a, "b", b);
  const CodeSpec spec = code_spec_of(op, axes, bits, symmetric);
  const CodeSpec b_spec = code_spec_of(op, {1}, b_bits, true);
  const Dtype a_dtype = dtype_of(op, a.scalar_type()), b_dtype = dtype_of(op, b.scalar_type());
  const Dtype dtype = dtype_of(op, out_dtype);
  Tensor y = empty_on_cpu(with_last(a, size.n), out_dtype);
  if (y.numel() == 0) return y;
  char* out = static_cast<char*>(y.mutable_data_ptr());
  const Kernels& kernels = kernels_of(current_isa());
  a = spec.per_tensor ? made_contiguous(a) : with_contiguous_rows(a);
  b = with_contiguous_rows_or_columns(b);
  const Matrices a_matrices(a), b_matrices(b);
  TensorCode shared{};
  std::vector<float> all_scales(spec.per_tensor ? size.batch * size.m : 0);
  if (spec.per_tensor) {
    shared = choose_tensor_code(kernels, {a.const_data_ptr(), a_dtype, size.batch * size.m, size.k},
                                spec, all_scales.data());
  }
  const int64_t work = work_of(kernels, size);
  const auto b_of = [&](int64_t i) {
    return StridedFloats{b_matrices[i],           b_dtype, size.n, size.k, b_matrices.row_stride,
                         b_matrices.column_stride};
  };
  const auto a_of = [&](int64_t i) {
    return FloatMatrix{a_matrices[i], a_dtype, size.m, size.k, a_matrices.row_stride};
  };
  const auto to_of = [&](int64_t i) {
    FloatOutput to = {nullptr, Activation::kNone, dtype, nullptr};
    to.data = out + i * size.m * size.n * to.element();
    return to;
  };
  const auto whole = [&](int64_t i) {
    thread_local PackMemory memory;
    const PackedWeight packed = pack_floats(kernels, b_of(i), b_spec, memory);
    const FloatOutput to = to_of(i);
    const FloatMatrix x = a_of(i);
    thread_local Scratch scratch;
    float* scales = spec.per_tensor ? all_scales.data() + i * size.m
                                    : scratch.get<float>(std::max<int64_t>(size.m, 1));
    in_chunks(kernels, packed, size.m, [&](int64_t first, int64_t count) {
      const TensorCode part = spec.per_tensor ? shared.part(i * size.m + first) : shared;
      const TensorCode* same = spec.per_tensor ? &part : nullptr;
      const FloatRows from(kernels, packed, x.part(first, count), spec, same, scales + first);
      gemm(from, packed, FloatSink(kernels, packed, from.rows, to, scales, 1, first));
    });
  };
  const auto jointly = [&](int64_t first, int64_t count) {
    thread_local Scratch scratch;
    float* scales =
        spec.per_tensor ? all_scales.data() + first * size.m : scratch.get<float>(count * size.m);
    std::deque<TensorCode> parts;
    Joint<FloatPanels, FloatRows, FloatSink> joint;
    for (int64_t i = 0; i < count; ++i) {
      JointMemory& memory = joint_memory(i);
      const auto& panels =
          joint.panels.emplace_back(kernels, b_of(first + i), b_spec, memory.panels);
      const auto* same =
          spec.per_tensor ? &parts.emplace_back(shared.part((first + i) * size.m)) : nullptr;
      float* of_rows = scales + i * size.m;
      const FloatRows& from = joint.rows.emplace_back(kernels, panels.weight, a_of(first + i), spec,
                                                      same, of_rows, memory.rows);
      const FloatOutput& to = joint.outputs.emplace_back(to_of(first + i));
      joint.sinks.emplace_back(kernels, panels.weight, from.rows, to, of_rows, 1, 0);
    }
    joint.run(work);
  };
  for_each_product(kernels, size, work, whole, jointly);
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(qfx, CPU, m) {
  implement<"int8_bmm", &int8_bmm>(m);
  implement<"int8_bmm_dynamic", &int8_bmm_dynamic>(m);
}

}  // namespace
}  // namespace qfx::cpu
