// kv_write, kv_keys, kv_values and kv_attention on the CPU.
#include <algorithm>
#include <vector>

#include "cpu/attention/cache.h"
#include "cpu/core/parallel.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/ops/arguments.h"
#include "cpu/ops/matrices.h"
#include "cpu/ops/written.h"
#include "implement.h"

namespace qfx::cpu {
namespace {

// The keys or the values of a cache, as operators are given them.
struct GivenPart {
  const char* op;
  CacheKind kind;
  const Tensor &codes, &scale;

  const char* name() const { return kind == CacheKind::kKeys ? "keys" : "values"; }
  const char* scale_name() const { return kind == CacheKind::kKeys ? "key_scale" : "value_scale"; }
  const char* layout() const {
    return kind == CacheKind::kKeys ? "[B, H, L / 16, D * bits / 8, 16]"
                                    : "[B, H, L, D * bits / 8]";
  }
};

// Whether what lies behind the axes up to `first` has no gaps.
bool dense_from(const Tensor& t, int64_t first) {
  if (t.numel() == 0) return true;
  int64_t expected = 1;
  for (int64_t axis = t.dim() - 1; axis >= first; --axis) {
    if (t.size(axis) != 1 && t.stride(axis) != expected) return false;
    expected *= t.size(axis);
  }
  return true;
}

int bits_of(const GivenPart& given) {
  const Tensor& scale = given.scale;
  check_dtype(given.op, given.scale_name(), scale, {ScalarType::Float});
  const bool fits = scale.dim() == 4 && (scale.size(3) == 1 || scale.size(3) == 2);
  STD_TORCH_CHECK(fits, given.op, ": ", given.scale_name(), " has shape ", shape_of(scale),
                  ", expected [B, H, L, 1] for codes of 8 bits or [B, H, L, 2] for 4");
  const int bits = scale.size(3) == 1 ? 8 : 4;
  check_cpu(given.op, given.name(), given.codes);
  const ScalarType expected = bits == 8 ? ScalarType::Char : ScalarType::Byte;
  STD_TORCH_CHECK(given.codes.scalar_type() == expected, given.op, ": ", given.name(),
                  " has dtype ", dtype_name(given.codes.scalar_type()), ", expected ",
                  dtype_name(expected), " for the ", bits, " bits that ", given.scale_name(),
                  " with shape ", shape_of(scale), " says");
  return bits;
}

CachePart part_of(const GivenPart& given) {
  const Tensor &codes = given.codes, &scale = given.scale;
  const int bits = bits_of(given);
  const bool keys = given.kind == CacheKind::kKeys;
  bool fits = codes.dim() == (keys ? 5 : 4) && codes.size(0) == scale.size(0) &&
              codes.size(1) == scale.size(1) && scale.size(2) % kTokens == 0;
  if (fits && keys) {
    fits = codes.size(4) == kTokens && codes.size(2) * kTokens == scale.size(2);
  } else if (fits) {
    fits = codes.size(2) == scale.size(2);
  }
  STD_TORCH_CHECK(fits, given.op, ": ", given.name(), " has shape ", shape_of(codes), " and ",
                  given.scale_name(), " ", shape_of(scale), ", expected ", given.layout(),
                  " and [B, H, L, 1 or 2], L a multiple of 16: see qfx.ops.kv_cache.kv_empty");
  STD_TORCH_CHECK(dense_from(codes, 2) && dense_from(scale, 2), given.op, ": ", given.name(),
                  " and ", given.scale_name(),
                  " are cut or permuted behind their first two axes, expected whole heads");
  return {static_cast<char*>(codes.mutable_data_ptr()),
          static_cast<char*>(scale.mutable_data_ptr()),
          codes.size(0),
          codes.size(1),
          scale.size(2),
          codes.size(3) * 8 / bits,
          bits,
          {codes.stride(0), codes.stride(1)},
          {scale.stride(0) * 4, scale.stride(1) * 4}};
}

TokenVectors vectors_of(const char* op, const Tensor& x) {
  const int64_t element = x.element_size();
  return {static_cast<const char*>(x.const_data_ptr()),
          dtype_of(op, x.scalar_type()),
          x.size(2),
          {x.stride(0) * element, x.stride(1) * element, x.stride(2) * element}};
}

void check_length(const char* op, int64_t length, int64_t capacity) {
  STD_TORCH_CHECK(length >= 0 && length <= capacity, op, ": length=", length, " is outside 0..",
                  capacity, ", the capacity of the cache");
}

// --- writing ---

void check_written(const GivenPart& given, const char* what, const Tensor& x,
                   const CachePart& part) {
  check_float(given.op, what, x);
  const bool fits =
      x.dim() == 4 && x.size(0) == part.batch && x.size(1) == part.heads && x.size(3) == part.d;
  STD_TORCH_CHECK(fits, given.op, ": ", what, " has shape ", shape_of(x), ", expected ", part.batch,
                  "x", part.heads, "xTx", part.d, ", which ", given.name(), " with shape ",
                  shape_of(given.codes), " and ", part.bits, " bits hold");
}

// A copy of `places`, checked: what is read to check it and what is written by it must be the same,
// whoever else holds its memory.
std::vector<int64_t> places_of(const char* op, const Tensor& places, const Tensor& k,
                               const Tensor& v, int64_t capacity) {
  check_dtype(op, "places", places, {ScalarType::Long});
  STD_TORCH_CHECK(places.dim() == 1 && places.numel() == k.size(2) && k.size(2) == v.size(2), op,
                  ": places has shape ", shape_of(places), ", k ", shape_of(k), " and v ",
                  shape_of(v), ", expected one place for each of their T tokens");
  const int64_t* given = static_cast<const int64_t*>(places.const_data_ptr());
  const int64_t step = places.stride(0);
  std::vector<int64_t> copy(k.size(2));
  for (int64_t t = 0; t < k.size(2); ++t) {
    copy[t] = given[t * step];
    STD_TORCH_CHECK(copy[t] >= 0 && copy[t] < capacity, op, ": token ", t,
                    " is to be written to place ", copy[t], ", which is outside 0..", capacity - 1,
                    ": the cache has room for ", capacity, " tokens");
  }
  return copy;
}

void kv_write(Tensor keys, Tensor key_scale, Tensor values, Tensor value_scale, Tensor k, Tensor v,
              Tensor places) {
  constexpr const char* op = "kv_write";
  constexpr int64_t kStepsPerElement = 32;  // in parallel.h's unit
  const GivenPart of_keys = {op, CacheKind::kKeys, keys, key_scale},
                  of_values = {op, CacheKind::kValues, values, value_scale};
  const CachePart key_part = part_of(of_keys), value_part = part_of(of_values);
  check_written(of_keys, "k", k, key_part);
  check_written(of_values, "v", v, value_part);
  const Written written(
      op,
      {{"keys", keys}, {"key_scale", key_scale}, {"values", values}, {"value_scale", value_scale}});
  const std::vector<int64_t> at =
      places_of(op, places, k, v, std::min(key_part.capacity, value_part.capacity));
  if (at.empty()) return;  // of heads without number, perhaps
  k = with_contiguous_rows(written.apart_from(k));
  v = with_contiguous_rows(written.apart_from(v));
  const TokenVectors k_tokens = vectors_of(op, k), v_tokens = vectors_of(op, v);
  const Kernels& kernels = kernels_of(current_isa());
  parallel(key_part.batch * key_part.heads, (k.numel() + v.numel()) * kStepsPerElement,
           [&](int64_t i, int64_t end) {
             for (; i < end; ++i) {
               write_cache(kernels, CacheKind::kKeys, key_part, k_tokens, at.data(), i);
               write_cache(kernels, CacheKind::kValues, value_part, v_tokens, at.data(), i);
             }
           });
}

// --- reading ---

Tensor read(const GivenPart& given, int64_t length, ScalarType out_dtype) {
  constexpr int64_t kStepsPerElement = 16;  // in parallel.h's unit
  const Dtype dtype = dtype_of(given.op, out_dtype);
  const CachePart part = part_of(given);
  check_length(given.op, length, part.capacity);
  Tensor y = empty_on_cpu({part.batch, part.heads, length, part.d}, out_dtype);
  if (y.numel() == 0) return y;
  char* out = static_cast<char*>(y.mutable_data_ptr());
  const int64_t bytes = length * part.d * size_of(dtype);
  const Kernels& kernels = kernels_of(current_isa());
  parallel(part.batch * part.heads, y.numel() * kStepsPerElement, [&](int64_t i, int64_t end) {
    for (; i < end; ++i) {
      read_cache(kernels, given.kind, part, length, dtype, out + i * bytes, i);
    }
  });
  return y;
}

Tensor kv_keys(Tensor keys, Tensor key_scale, int64_t length, ScalarType out_dtype) {
  return read({"kv_keys", CacheKind::kKeys, keys, key_scale}, length, out_dtype);
}

Tensor kv_values(Tensor values, Tensor value_scale, int64_t length, ScalarType out_dtype) {
  return read({"kv_values", CacheKind::kValues, values, value_scale}, length, out_dtype);
}

// --- attention ---

void check_queries(const char* op, const Tensor& q, const CachePart& keys,
                   const CachePart& values) {
  check_float(op, "q", q);
  STD_TORCH_CHECK(keys.batch == values.batch && keys.heads == values.heads, op, ": keys are of ",
                  keys.batch, " sequences and ", keys.heads, " heads but values of ", values.batch,
                  " and ", values.heads);
  const bool fits = q.dim() == 4 && q.size(0) == keys.batch && q.size(3) == keys.d &&
                    (keys.heads == 0 ? q.size(1) == 0 : q.size(1) % keys.heads == 0);
  STD_TORCH_CHECK(fits, op, ": q has shape ", shape_of(q), ", expected ", keys.batch, "xHqxTx",
                  keys.d, ", Hq a multiple of the ", keys.heads, " heads of keys");
}

void check_mask(const char* op, const Tensor& mask, const Tensor& q, int64_t length) {
  check_dtype(op, "mask", mask, {ScalarType::Float, ScalarType::Bool});
  const int64_t sizes[] = {q.size(0), q.size(1), q.size(2), length};
  bool fits = mask.dim() <= 4;
  for (int64_t i = 0; fits && i < mask.dim(); ++i) {
    fits = mask.size(i) == 1 || mask.size(i) == sizes[4 - mask.dim() + i];
  }
  STD_TORCH_CHECK(fits, op, ": mask has shape ", shape_of(mask),
                  ", which does not broadcast to the scores of q with shape ", shape_of(q),
                  " and length=", length);
}

void take_mask(const Tensor& mask, CacheAttention* a) {
  const auto step = [&](int64_t axis) {
    const int64_t own = axis - (4 - mask.dim());
    return own < 0 || mask.size(own) == 1 ? 0 : mask.stride(own) * mask.element_size();
  };
  const bool flags = mask.scalar_type() == ScalarType::Bool;
  a->mask = {flags ? Mask::Kind::kBool : Mask::Kind::kFloat,
             static_cast<const char*>(mask.const_data_ptr()), step(2), step(3)};
  a->mask_strides[0] = step(0);
  a->mask_strides[1] = step(1);
}

Tensor kv_attention(Tensor q, Tensor keys, Tensor key_scale, Tensor values, Tensor value_scale,
                    std::optional<Tensor> mask, double scale, int64_t length,
                    ScalarType out_dtype) {
  constexpr const char* op = "kv_attention";
  CacheAttention a = {};
  a.dtype = dtype_of(op, out_dtype);
  a.keys = part_of({op, CacheKind::kKeys, keys, key_scale});
  a.values = part_of({op, CacheKind::kValues, values, value_scale});
  check_queries(op, q, a.keys, a.values);
  check_length(op, length, std::min(a.keys.capacity, a.values.capacity));
  if (mask.has_value()) check_mask(op, *mask, q, length);
  q = with_contiguous_rows(q);
  Tensor y = empty_on_cpu({q.size(0), q.size(1), q.size(2), a.values.d}, out_dtype);
  if (y.numel() == 0) return y;
  a.q = vectors_of(op, q);
  a.group = q.size(1) / a.keys.heads;
  a.length = length;
  if (mask.has_value()) take_mask(*mask, &a);
  a.scale = static_cast<float>(scale);
  a.out = static_cast<char*>(y.mutable_data_ptr());
  const int64_t heads = a.keys.batch * a.keys.heads;
  const int64_t steps = heads * a.group * q.size(2) * length * (a.keys.d + a.values.d);
  const Kernels& kernels = kernels_of(current_isa());
  parallel(heads, steps, [&](int64_t i, int64_t end) { attend_to_cache(kernels, a, i, end); });
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(qfx, CPU, m) {
  implement<"kv_write", &kv_write>(m);
  implement<"kv_keys", &kv_keys>(m);
  implement<"kv_values", &kv_values>(m);
  implement<"kv_attention", &kv_attention>(m);
}

}  // namespace
}  // namespace qfx::cpu
