// int8_attention, attention_decode and attention_append on the CPU.
#include <algorithm>
#include <cstring>
#include <tuple>

#include "cpu/arguments.h"
#include "cpu/attention.h"
#include "cpu/matrices.h"
#include "cpu/parallel.h"
#include "implement.h"

namespace qfx::cpu {
namespace {

struct Sizes {
  int64_t batch, m, n, d, e;
};

Sizes sizes_of(const char* op, const Tensor& q, const Tensor& k, const Tensor& v) {
  const auto same_batch = [&](const Tensor& t) {
    return t.dim() == q.dim() &&
           std::equal(q.sizes().begin(), q.sizes().end() - 2, t.sizes().begin());
  };
  STD_TORCH_CHECK(q.dim() >= 2 && same_batch(k) && same_batch(v), op, ": q has shape ", shape_of(q),
                  ", k ", shape_of(k), " and v ", shape_of(v),
                  ", expected [*B, M, D], [*B, N, D] and [*B, N, E] with the same batch axes");
  const int64_t last = q.dim() - 1, d = q.size(last), n = k.size(last - 1);
  STD_TORCH_CHECK(d == k.size(last), op, ": q has D=", d, " (shape ", shape_of(q),
                  ") but k has D=", k.size(last), " (shape ", shape_of(k), ")");
  STD_TORCH_CHECK(n == v.size(last - 1), op, ": k has N=", n, " keys (shape ", shape_of(k),
                  ") but v has ", v.size(last - 1), " (shape ", shape_of(v), ")");
  STD_TORCH_CHECK(std::max(n, d) <= kMaxK, op, ": N=", n, " or D=", d, " is above ", kMaxK,
                  ", where the int32 accumulator of a dot product could overflow");
  int64_t batch = 1;
  for (auto size = q.sizes().begin(); size != q.sizes().end() - 2; ++size) batch *= *size;
  return {batch, q.size(last - 1), n, d, v.size(last)};
}

// A mask that broadcasts to [*B, M, N]: sizes of 1 and missing axes repeat.
class Masks {
 public:
  Masks(const char* op, const std::optional<Tensor>& mask, const Tensor& q, int64_t n) {
    if (!mask.has_value()) return;
    check_dtype(op, "mask", *mask, {ScalarType::Float, ScalarType::Bool});
    mask_.kind = mask->scalar_type() == ScalarType::Bool ? Mask::Kind::kBool : Mask::Kind::kFloat;
    mask_.data = static_cast<const char*>(mask->const_data_ptr());
    sizes_.assign(q.sizes().begin(), q.sizes().end());
    sizes_.back() = n;
    const int64_t missing = q.dim() - mask->dim();
    const int64_t element = mask_.kind == Mask::Kind::kBool ? 1 : 4;
    strides_.assign(q.dim(), 0);
    bool fits = missing >= 0;
    for (int64_t i = std::max<int64_t>(missing, 0); fits && i < q.dim(); ++i) {
      const int64_t size = mask->size(i - missing);
      fits = size == 1 || size == sizes_[i];
      strides_[i] = size == 1 ? 0 : mask->stride(i - missing) * element;
    }
    STD_TORCH_CHECK(fits, op, ": mask has shape ", shape_of(*mask),
                    ", which does not broadcast to the scores of q with shape ", shape_of(q),
                    " and N=", n);
    mask_.row_stride = strides_[q.dim() - 2];
    mask_.column_stride = strides_[q.dim() - 1];
  }

  Mask operator[](int64_t i) const {
    Mask mask = mask_;
    for (int64_t d = static_cast<int64_t>(sizes_.size()) - 2; d-- > 0; i /= sizes_[d]) {
      mask.data += i % sizes_[d] * strides_[d];
    }
    return mask;
  }

 private:
  Mask mask_;
  std::vector<int64_t> sizes_, strides_;
};

FloatMatrix matrix(const Matrices& all, int64_t i, Dtype dtype) {
  return {all[i], dtype, all.rows, all.columns, all.row_stride};
}

// each(i, attention) for every matrix of the batch; `op` says who asks.
template <typename Each>
Tensor attention(const char* op, Tensor q, Tensor k, Tensor v, const std::optional<Tensor>& mask,
                 double scale, bool causal, ScalarType out_dtype, const Each& each) {
  check_float(op, "q", q);
  check_float(op, "k", k);
  check_float(op, "v", v);
  const Sizes size = sizes_of(op, q, k, v);
  const Masks masks(op, mask, q, size.n);
  q = with_contiguous_rows(q);
  k = with_contiguous_rows(k);
  v = with_contiguous_rows(v);
  const Dtype q_dtype = dtype_of(op, q.scalar_type()), k_dtype = dtype_of(op, k.scalar_type()),
              v_dtype = dtype_of(op, v.scalar_type()), dtype = dtype_of(op, out_dtype);
  Tensor y = empty_on_cpu(with_last(q, size.e), out_dtype);
  char* out = static_cast<char*>(y.mutable_data_ptr());
  if (y.numel() == 0) return y;  // of matrices without number, perhaps
  const int64_t bytes = size.m * size.e * (dtype == Dtype::kFloat32 ? 4 : 2);
  const Matrices queries(q), keys(k), values(v);
  constexpr int64_t kStepsPerScore = 64;  // in parallel.h's unit
  const int64_t work = size.batch * size.m * size.n * (size.d + 2 * size.e + kStepsPerScore);
  parallel(size.batch, work, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      each(i, Attention{matrix(queries, i, q_dtype), matrix(keys, i, k_dtype),
                        matrix(values, i, v_dtype), masks[i], static_cast<float>(scale), causal,
                        dtype, out + i * bytes});
    }
  });
  return y;
}

Tensor int8_attention(Tensor q, Tensor k, Tensor v, std::optional<Tensor> mask, double scale,
                      bool causal, ScalarType out_dtype) {
  const Kernels& kernels = kernels_of(current_isa());
  return attention("int8_attention", q, k, v, mask, scale, causal, out_dtype,
                   [&](int64_t, const Attention& a) { attend(kernels, a); });
}

Tensor attention_decode(Tensor q, Tensor k, Tensor v, std::optional<Tensor> mask, double scale,
                        bool causal, ScalarType out_dtype) {
  const Kernels& kernels = kernels_of(current_isa());
  return attention("attention_decode", q, k, v, mask, scale, causal, out_dtype,
                   [&](int64_t, const Attention& a) { attend_in_float(kernels, a); });
}

// The rows of `past`, then those of `added`: [*B, P + R, D], filled one matrix at a time.
class Grown {
 public:
  Grown(const char* op, const char* what, const Tensor& past, const Tensor& added)
      : past_tensor_(checked(op, what, past, added)),
        added_tensor_(with_contiguous_rows(added)),
        past_(past_tensor_),
        added_(added_tensor_),
        whole_(empty_on_cpu(shape_with(past, past_.rows + added_.rows), past.scalar_type())) {}

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
  static Tensor checked(const char* op, const char* what, const Tensor& past, const Tensor& added) {
    const bool same =
        past.dim() >= 2 && past.dim() == added.dim() && past.scalar_type() == added.scalar_type() &&
        past.size(past.dim() - 1) == added.size(past.dim() - 1) &&
        std::equal(past.sizes().begin(), past.sizes().end() - 2, added.sizes().begin());
    STD_TORCH_CHECK(same, op, ": past_", what, " is ", dtype_name(past.scalar_type()),
                    " with shape ", shape_of(past), " and ", what, " ",
                    dtype_name(added.scalar_type()), " with shape ", shape_of(added),
                    ", expected one dtype and shapes [*B, P, D] and [*B, R, D]");
    return with_contiguous_rows(past);
  }

  static std::vector<int64_t> shape_with(const Tensor& t, int64_t rows) {
    std::vector<int64_t> shape(t.sizes().begin(), t.sizes().end());
    shape[shape.size() - 2] = rows;
    return shape;
  }

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
  const Grown keys(op, "k", past_k, k), values(op, "v", past_v, v);
  const Kernels& kernels = kernels_of(current_isa());
  Tensor y = attention(op, q, keys.whole(), values.whole(), mask, scale, causal, out_dtype,
                       [&](int64_t i, const Attention& a) {
                         keys.fill(i);
                         values.fill(i);
                         attend_in_float(kernels, a);
                       });
  if (y.numel() == 0) {  // which nothing attended to
    keys.fill_all();
    values.fill_all();
  }
  return {y, keys.whole(), values.whole()};
}

STABLE_TORCH_LIBRARY_IMPL(qfx, CPU, m) {
  implement<"int8_attention", &int8_attention>(m);
  implement<"attention_decode", &attention_decode>(m);
  implement<"attention_append", &attention_append>(m);
}

}  // namespace
}  // namespace qfx::cpu
