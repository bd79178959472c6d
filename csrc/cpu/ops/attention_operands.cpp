#include "cpu/ops/attention_operands.h"

#include <algorithm>

namespace qfx::cpu {
namespace {

// A batch axis: its size in the result, and the steps of the operands along it in bytes.
struct Axis {
  int64_t size, q, k, v, mask, out;

  bool shared() const { return k == 0 && v == 0; }
};

int64_t step(const Tensor& t, int64_t axis) {
  return t.size(axis) == 1 ? 0 : t.stride(axis) * t.element_size();
}

// Queries of each head of keys along this axis, 1 unless k and v have fewer heads.
int64_t queries_per_head(const AttentionSizes& a, size_t axis) {
  const int64_t q = a.q[axis], k = a.k[axis];
  const bool fewer = axis + 3 == a.q.size() && k == a.v[axis] && k > 1 && q > k && q % k == 0;
  return fewer ? q / k : 1;
}

// The size of the result along a batch axis, or -1 where the operands' do not fit.
int64_t batch_size(const AttentionSizes& a, size_t axis) {
  if (queries_per_head(a, axis) > 1) return a.q[axis];
  int64_t size = 1;
  for (const Sizes& t : {a.q, a.k, a.v}) size = t[axis] == 1 ? size : t[axis];
  for (const Sizes& t : {a.q, a.k, a.v}) {
    if (t[axis] != 1 && t[axis] != size) return -1;
  }
  return size;
}

void check_mask(const char* op, const Tensor& mask, const AttentionSizes& a,
                const std::vector<int64_t>& shape, int64_t n) {
  check_dtype(op, "mask", mask, {ScalarType::Float, ScalarType::Bool});
  const int64_t dim = static_cast<int64_t>(shape.size()), missing = dim - mask.dim();
  bool fits = missing >= 0;
  for (int64_t i = std::max<int64_t>(missing, 0); fits && i < dim; ++i) {
    const int64_t size = mask.size(i - missing);
    fits = size == 1 || size == (i == dim - 1 ? n : shape[i]);
  }
  STD_TORCH_CHECK(fits, op, ": mask has shape ", shape_of(mask),
                  ", which does not broadcast to the scores of q with shape ", text_of(a.q),
                  " and N=", n);
}

// The mask's step along an axis of the result, or of its rows and columns.
int64_t mask_step(const std::optional<Tensor>& mask, int64_t axis, int64_t dim) {
  if (!mask.has_value()) return 0;
  const int64_t own = axis - (dim - mask->dim());
  return own < 0 ? 0 : step(*mask, own);
}

// The batch axes, those of keys in front of those of queries that share them.
std::vector<Axis> axes_of(const AttentionOperands& a, const Tensor& y) {
  const AttentionSizes sizes = {a.q.sizes(), a.k.sizes(), a.v.sizes()};
  std::vector<Axis> axes;
  for (int64_t i = 0; i < y.dim() - 2; ++i) {
    const Axis axis = {y.size(i),
                       step(a.q, i),
                       step(a.k, i),
                       step(a.v, i),
                       mask_step(a.mask, i, y.dim()),
                       y.stride(i) * y.element_size()};
    const int64_t group = queries_per_head(sizes, static_cast<size_t>(i));
    if (group == 1) {
      axes.push_back(axis);
      continue;
    }
    axes.push_back(
        {axis.size / group, axis.q * group, axis.k, axis.v, axis.mask * group, axis.out * group});
    axes.push_back({group, axis.q, 0, 0, axis.mask, axis.out});
  }
  std::stable_partition(axes.begin(), axes.end(), [](const Axis& a) { return !a.shared(); });
  return axes;
}

FloatMatrix sizes_of(const char* op, const Tensor& t) {
  const int64_t axis = t.dim() - 1;
  return {nullptr, dtype_of(op, t.scalar_type()), t.size(axis - 1), t.size(axis),
          t.stride(axis - 1)};
}

// Where the operands of element i of the axes lie, in bytes from their beginnings.
Axis offset_of(const std::vector<Axis>& axes, int64_t i) {
  Axis offset = {};
  for (auto axis = axes.rbegin(); axis != axes.rend(); ++axis) {
    const int64_t at = i % axis->size;
    offset.q += at * axis->q;
    offset.k += at * axis->k;
    offset.v += at * axis->v;
    offset.mask += at * axis->mask;
    offset.out += at * axis->out;
    i /= axis->size;
  }
  return offset;
}

bool shows_all(const Tensor& mask) {
  if (mask.numel() == 0) return false;
  std::vector<MaskAxis> axes;
  for (int64_t i = 0; i < mask.dim(); ++i) axes.push_back({mask.size(i), step(mask, i)});
  const bool flags = mask.scalar_type() == ScalarType::Bool;
  return changes_nothing(flags ? Mask::Kind::kBool : Mask::Kind::kFloat,
                         static_cast<const char*>(mask.const_data_ptr()), std::move(axes));
}

}  // namespace

std::vector<int64_t> attention_shape(const char* op, const AttentionSizes& a,
                                     const std::optional<Tensor>& mask) {
  const Sizes &q = a.q, &k = a.k, &v = a.v;
  bool fits = q.size() >= 2 && q.size() == k.size() && q.size() == v.size();
  std::vector<int64_t> shape(q.begin(), q.end());
  for (size_t i = 0; fits && i + 2 < q.size(); ++i) {
    shape[i] = batch_size(a, i);
    fits = shape[i] >= 0;
  }
  STD_TORCH_CHECK(fits, op, ": q has shape ", text_of(q), ", k ", text_of(k), " and v ", text_of(v),
                  ", expected [*B, M, D], [*B, N, D] and [*B, N, E] with batch axes ",
                  "that broadcast, or heads of q in groups that share one of k and v");
  const size_t last = q.size() - 1;
  const int64_t d = q[last], n = k[last - 1];
  STD_TORCH_CHECK(d == k[last], op, ": q has D=", d, " (shape ", text_of(q),
                  ") but k has D=", k[last], " (shape ", text_of(k), ")");
  STD_TORCH_CHECK(n == v[last - 1], op, ": k has N=", n, " keys (shape ", text_of(k),
                  ") but v has ", v[last - 1], " (shape ", text_of(v), ")");
  STD_TORCH_CHECK(std::max(n, d) <= kMaxK, op, ": N=", n, " or D=", d, " is above ", kMaxK,
                  ", where the int32 accumulator of a dot product could overflow");
  shape[last] = v[last];
  if (mask.has_value()) check_mask(op, *mask, a, shape, n);
  return shape;
}

Attention attention_of(const char* op, const AttentionOperands& given, const Tensor& y) {
  const std::optional<Tensor> none;
  const bool masked = given.mask.has_value() && !shows_all(*given.mask);
  const AttentionOperands a = {given.q,     given.k,     given.v, masked ? given.mask : none,
                               given.scale, given.causal};
  const int64_t dim = y.dim();
  Attention made = {sizes_of(op, a.q),
                    sizes_of(op, a.k),
                    sizes_of(op, a.v),
                    {},
                    static_cast<float>(a.scale),
                    a.causal,
                    dtype_of(op, y.scalar_type()),
                    {},
                    {}};
  const char* mask = nullptr;
  if (a.mask.has_value()) {
    const bool flags = a.mask->scalar_type() == ScalarType::Bool;
    made.mask = {flags ? Mask::Kind::kBool : Mask::Kind::kFloat, nullptr,
                 mask_step(a.mask, dim - 2, dim), mask_step(a.mask, dim - 1, dim)};
    mask = static_cast<const char*>(a.mask->const_data_ptr());
  }
  const std::vector<Axis> axes = axes_of(a, y);
  int64_t heads = 1, group = 1;
  for (const Axis& axis : axes) (axis.shared() ? group : heads) *= axis.size;
  const char *q = static_cast<const char*>(a.q.const_data_ptr()),
             *k = static_cast<const char*>(a.k.const_data_ptr()),
             *v = static_cast<const char*>(a.v.const_data_ptr());
  char* out = static_cast<char*>(y.mutable_data_ptr());
  for (int64_t i = 0; i < heads * group; ++i) {
    const Axis offset = offset_of(axes, i);
    if (i % group == 0) made.keys.push_back({k + offset.k, v + offset.v});
    made.queries.push_back({q + offset.q, mask + offset.mask, out + offset.out});
  }
  return made;
}

}  // namespace qfx::cpu
