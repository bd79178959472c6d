// int8_attention, its gradients, attention_decode and attention_append on the CPU.
#include <algorithm>
#include <cstring>
#include <tuple>

#include "cpu/attention/backward.h"
#include "cpu/core/parallel.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/ops/attention_operands.h"
#include "cpu/ops/matrices.h"
#include "implement.h"

namespace qfx::cpu {
namespace {

// The shape of an attention's result, once its operands are checked. `sizes` are those of q, k, v
// or of what k and v are a part of.
std::vector<int64_t> checked_shape(const char* op, const Tensor& q, const Tensor& k,
                                   const Tensor& v, const AttentionSizes& sizes,
                                   const std::optional<Tensor>& mask, ScalarType out_dtype) {
  check_float(op, "q", q);
  check_float(op, "k", k);
  check_float(op, "v", v);
  dtype_of(op, out_dtype);
  return attention_shape(op, sizes, mask);
}

std::vector<int64_t> shape_like(const Tensor& t) { return {t.sizes().begin(), t.sizes().end()}; }

// t with contiguous rows, and a matrix of its own for each element of the batch.
Tensor with_own_rows(const Tensor& t) {
  bool expanded = false;
  for (int64_t i = 0; i + 2 < t.dim(); ++i) {
    expanded = expanded || (t.size(i) > 1 && t.stride(i) == 0);
  }
  return expanded ? made_contiguous(t) : with_contiguous_rows(t);
}

// The result of run(attention), which writes it; `op` says who asks.
template <typename Run>
Tensor attention(const char* op, Tensor q, Tensor k, Tensor v, const std::optional<Tensor>& mask,
                 double scale, bool causal, ScalarType out_dtype, const Run& run) {
  const auto shape = checked_shape(op, q, k, v, {q.sizes(), k.sizes(), v.sizes()}, mask, out_dtype);
  q = with_contiguous_rows(q);
  k = with_contiguous_rows(k);
  v = with_contiguous_rows(v);
  Tensor y = empty_on_cpu(shape, out_dtype);
  if (y.numel() == 0) return y;  // of matrices without number, perhaps
  run(attention_of(op, {q, k, v, mask, scale, causal}, y));
  return y;
}

Tensor int8_attention(Tensor q, Tensor k, Tensor v, std::optional<Tensor> mask, double scale,
                      bool causal, ScalarType out_dtype) {
  const Kernels& kernels = kernels_of(current_isa());
  return attention("int8_attention", q, k, v, mask, scale, causal, out_dtype,
                   [&](const Attention& a) { attend(kernels, a); });
}

// The gradients of the queries, keys and values of int8_attention.
std::tuple<Tensor, Tensor, Tensor> int8_attention_backward(Tensor grad, Tensor q, Tensor k,
                                                           Tensor v, std::optional<Tensor> mask,
                                                           double scale, bool causal) {
  constexpr const char* op = "int8_attention_backward";
  auto shape =
      checked_shape(op, q, k, v, {q.sizes(), k.sizes(), v.sizes()}, mask, grad.scalar_type());
  check_float(op, "grad", grad);
  const auto batch_of = [](const Tensor& t) {
    return std::vector<int64_t>(t.sizes().begin(), t.sizes().end() - 2);
  };
  const bool whole =
      std::equal(grad.sizes().begin(), grad.sizes().end(), shape.begin(), shape.end()) &&
      batch_of(q) == batch_of(grad) && batch_of(k) == batch_of(v);
  STD_TORCH_CHECK(whole, op, ": grad has shape ", shape_of(grad), ", q ", shape_of(q), ", k ",
                  shape_of(k), " and v ", shape_of(v),
                  ", expected grad and q with all batch axes of the result, and k and v with the "
                  "same ones");
  Tensor dq = empty_on_cpu(shape_like(q), q.scalar_type());
  Tensor dk = empty_on_cpu(shape_like(k), k.scalar_type());
  Tensor dv = empty_on_cpu(shape_like(v), v.scalar_type());
  if (grad.numel() == 0 || k.numel() == 0) {
    for (const Tensor* t : {&dq, &dk, &dv}) {
      std::memset(t->mutable_data_ptr(), 0, t->numel() * t->element_size());
    }
    return {dq, dk, dv};
  }
  grad = with_contiguous_rows(grad);
  q = with_contiguous_rows(q);
  k = with_own_rows(k);
  v = with_own_rows(v);
  AttentionGradient all = {attention_of(op, {q, k, v, mask, scale, causal}, dq), {}, {}, {}};
  const std::optional<Tensor> none;
  const Attention of_grad = attention_of(op, {grad, k, v, none, scale, causal}, dq);
  all.forward.dtype = dtype_of(op, q.scalar_type());
  all.g = of_grad.q;
  for (const QueryHead& head : of_grad.queries) all.heads.push_back(head.q);
  for (int64_t i = 0; i < all.forward.heads(); ++i) {
    const int64_t of_k = k.size(k.dim() - 2) * k.size(k.dim() - 1) * k.element_size();
    const int64_t of_v = v.size(v.dim() - 2) * v.size(v.dim() - 1) * v.element_size();
    all.keys.push_back({static_cast<char*>(dk.mutable_data_ptr()) + i * of_k,
                        static_cast<char*>(dv.mutable_data_ptr()) + i * of_v});
  }
  attend_backward(kernels_of(current_isa()), all);
  return {dq, dk, dv};
}

// Multiply-accumulates of a head's queries.
int64_t steps_of_head(const Attention& a) {
  return a.group() * a.q.rows * a.k.rows * (a.q.columns + a.v.columns);
}

Tensor attention_decode(Tensor q, Tensor k, Tensor v, std::optional<Tensor> mask, double scale,
                        bool causal, ScalarType out_dtype) {
  const Kernels& kernels = kernels_of(current_isa());
  return attention("attention_decode", q, k, v, mask, scale, causal, out_dtype,
                   [&](const Attention& a) {
                     const int64_t queries = static_cast<int64_t>(a.queries.size());
                     parallel(queries, a.heads() * steps_of_head(a), [&](int64_t i, int64_t end) {
                       for (; i < end; ++i) attend_in_float(kernels, a, i);
                     });
                   });
}

// [*B, P + R, D], the shape of the rows of `past` and those of `added`.
std::vector<int64_t> grown_shape(const char* op, const char* what, const Tensor& past,
                                 const Tensor& added) {
  const bool same = past.dim() >= 2 && past.dim() == added.dim() &&
                    past.scalar_type() == added.scalar_type() &&
                    past.size(past.dim() - 1) == added.size(past.dim() - 1) &&
                    std::equal(past.sizes().begin(), past.sizes().end() - 2, added.sizes().begin());
  STD_TORCH_CHECK(same, op, ": past_", what, " is ", dtype_name(past.scalar_type()), " with shape ",
                  shape_of(past), " and ", what, " ", dtype_name(added.scalar_type()),
                  " with shape ", shape_of(added),
                  ", expected one dtype and shapes [*B, P, D] and [*B, R, D]");
  check_cpu(op, what, added);
  std::vector<int64_t> shape(past.sizes().begin(), past.sizes().end());
  shape[shape.size() - 2] += added.size(past.dim() - 2);
  return shape;
}

// The rows of `past`, then those of `added`, filled one matrix at a time.
class Grown {
 public:
  Grown(const Tensor& past, const Tensor& added, const std::vector<int64_t>& shape)
      : past_tensor_(with_contiguous_rows(past)),
        added_tensor_(with_contiguous_rows(added)),
        past_(past_tensor_),
        added_(added_tensor_),
        whole_(empty_on_cpu(shape, past.scalar_type())) {}

  const Tensor& whole() const { return whole_; }

  void fill_all() const {
    const int64_t count = whole_.numel() == 0 ? 0 : past_.count;
    for (int64_t i = 0; i < count; ++i) fill(i);
  }

  void fill(int64_t i) const {
    const int64_t bytes = past_.columns * past_.element;
    char* out =
        static_cast<char*>(whole_.mutable_data_ptr()) + i * (past_.rows + added_.rows) * bytes;
    copy(past_, i, out);
    copy(added_, i, out + past_.rows * bytes);
  }

 private:
  static void copy(const Matrices& from, int64_t i, char* out) {
    const int64_t bytes = from.columns * from.element;
    if (bytes == 0) return;
    const char* rows = from[i];
    if (from.row_stride == from.columns) {
      std::memcpy(out, rows, from.rows * bytes);
      return;
    }
    for (int64_t r = 0; r < from.rows; ++r) {
      std::memcpy(out + r * bytes, rows + r * from.row_stride * from.element, bytes);
    }
  }

  Tensor past_tensor_, added_tensor_;  // keep what the two below point to
  Matrices past_, added_;
  Tensor whole_;
};

// Each head's keys and values are copied just before they are read, so they come from the cache.
std::tuple<Tensor, Tensor, Tensor> attention_append(Tensor q, Tensor past_k, Tensor k,
                                                    Tensor past_v, Tensor v,
                                                    std::optional<Tensor> mask, double scale,
                                                    bool causal, ScalarType out_dtype) {
  constexpr const char* op = "attention_append";
  const auto k_shape = grown_shape(op, "k", past_k, k), v_shape = grown_shape(op, "v", past_v, v);
  checked_shape(op, q, past_k, past_v, {q.sizes(), k_shape, v_shape}, mask, out_dtype);
  STD_TORCH_CHECK(std::equal(k_shape.begin(), k_shape.end() - 2, v_shape.begin()), op,
                  ": past_k has shape ", shape_of(past_k), " but past_v ", shape_of(past_v),
                  ", expected the same batch axes");
  const Grown keys(past_k, k, k_shape), values(past_v, v, v_shape);
  const Kernels& kernels = kernels_of(current_isa());
  Tensor y = attention(
      op, q, keys.whole(), values.whole(), mask, scale, causal, out_dtype, [&](const Attention& a) {
        parallel(a.heads(), a.heads() * steps_of_head(a), [&](int64_t i, int64_t end) {
          for (; i < end; ++i) {
            keys.fill(i);
            values.fill(i);
            for (int64_t j = 0; j < a.group(); ++j) {
              attend_in_float(kernels, a, i * a.group() + j);
            }
          }
        });
      });
  if (y.numel() == 0) {  // which nothing attended to
    keys.fill_all();
    values.fill_all();
  }
  return {y, keys.whole(), values.whole()};
}

STABLE_TORCH_LIBRARY_IMPL(qfx, CPU, m) {
  implement<"int8_attention", &int8_attention>(m);
  implement<"int8_attention_backward", &int8_attention_backward>(m);
  implement<"attention_decode", &attention_decode>(m);
  implement<"attention_append", &attention_append>(m);
}

}  // namespace
}  // namespace qfx::cpu
