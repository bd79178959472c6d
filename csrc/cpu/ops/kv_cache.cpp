// kv_write, kv_copy_blocks, kv_keys, kv_values and kv_attention on the CPU.
#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/core/parallel.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/ops/alias_check.h"
#include "cpu/ops/kv_operands.h"
#include "cpu/ops/matrices.h"
#include "implement.h"

namespace qfx::cpu {
namespace {

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

// A copy of `places`, [T] or [B, T], checked: what is read to check it and what is written by it
// must be the same, whoever else holds its memory.
std::vector<int64_t> places_of(const char* op, const Tensor& places, const Tensor& k,
                               const Tensor& v, int64_t capacity) {
  check_dtype(op, "places", places, {ScalarType::Long});
  const bool shared = places.dim() == 1, fits = shared || places.dim() == 2;
  STD_TORCH_CHECK(fits && places.size(-1) == k.size(2) && k.size(2) == v.size(2) &&
                      (shared || places.size(0) == k.size(0)),
                  op, ": places has shape ", shape_of(places), ", k ", shape_of(k), " and v ",
                  shape_of(v), ", expected one place for each of their T tokens, [T] or [B, T]");
  const int64_t* given = static_cast<const int64_t*>(places.const_data_ptr());
  const int64_t sequences = shared ? 1 : places.size(0), tokens = k.size(2);
  std::vector<int64_t> copy;
  for (int64_t i = 0; i < sequences * tokens; ++i) {
    const int64_t b = i / tokens, t = i % tokens;
    copy.push_back(given[(shared ? 0 : b * places.stride(0)) + t * places.stride(-1)]);
    STD_TORCH_CHECK(copy[i] >= Places::kNowhere && copy[i] < capacity, op, ": token ", t,
                    " is to be written to place ", copy[i], ", which is outside 0..", capacity - 1,
                    ": the cache has room for ", capacity, " tokens, and -1 writes none");
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
  const Places where = {at.data(), places.dim() == 1 ? 0 : k_tokens.tokens};
  const Kernels& kernels = kernels_of(current_isa());
  parallel(key_part.batch * key_part.heads, (k.numel() + v.numel()) * kStepsPerElement,
           [&](int64_t i, int64_t end) {
             for (; i < end; ++i) {
               write_cache(kernels, CacheKind::kKeys, key_part, k_tokens, where, i);
               write_cache(kernels, CacheKind::kValues, value_part, v_tokens, where, i);
             }
           });
}

// A tensor of a cache as blocks of 16 tokens, each in one piece: [B, H, L / 16, bytes].
struct Blocks {
  char* data;
  int64_t strides[2], bytes;  // strides of B and H, all in bytes

  explicit Blocks(const Tensor& t)
      : data(static_cast<char*>(t.mutable_data_ptr())),
        strides{t.stride(0) * t.element_size(), t.stride(1) * t.element_size()},
        bytes(t.element_size() * (t.dim() == 5 ? t.size(3) * t.size(4) : t.size(3) * kTokens)) {}

  char* at(int64_t b, int64_t h, int64_t block) const {
    return data + b * strides[0] + h * strides[1] + block * bytes;
  }
};

// [B], contiguous and copied, each from `low` to below `end`.
std::vector<int64_t> numbers_of(const char* op, const char* what, const Tensor& given,
                                int64_t batch, int64_t low, int64_t end) {
  check_dtype(op, what, given, {ScalarType::Long});
  STD_TORCH_CHECK(given.dim() == 1 && given.size(0) == batch, op, ": ", what, " has shape ",
                  shape_of(given), ", expected [", batch, "], one for each sequence");
  const int64_t* from = static_cast<const int64_t*>(given.const_data_ptr());
  std::vector<int64_t> found;
  for (int64_t b = 0; b < batch; ++b) {
    found.push_back(from[b * given.stride(0)]);
    STD_TORCH_CHECK(found[b] >= low && found[b] < end, op, ": ", what, " has ", found[b],
                    " for sequence ", b, ", which is outside ", low, "..", end - 1);
  }
  return found;
}

void kv_copy_blocks(Tensor keys, Tensor key_scale, Tensor values, Tensor value_scale,
                    Tensor sources, Tensor blocks) {
  constexpr const char* op = "kv_copy_blocks";
  const CachePart part = part_of({op, CacheKind::kKeys, keys, key_scale});
  const int64_t room =
      std::min(part.capacity, part_of({op, CacheKind::kValues, values, value_scale}).capacity);
  STD_TORCH_CHECK(values.size(0) == part.batch && values.size(1) == part.heads, op,
                  ": keys have shape ", shape_of(keys), " and values ", shape_of(values),
                  ", expected the same sequences and heads");
  const Written written(
      op,
      {{"keys", keys}, {"key_scale", key_scale}, {"values", values}, {"value_scale", value_scale}});
  const auto from = numbers_of(op, "sources", sources, part.batch, 0, part.batch);
  const auto at = numbers_of(op, "blocks", blocks, part.batch, -1, room / kTokens);
  for (const Blocks& tensor :
       {Blocks(keys), Blocks(key_scale), Blocks(values), Blocks(value_scale)}) {
    const int64_t bytes = tensor.bytes;
    std::vector<char> copies(part.batch * part.heads * bytes);
    const auto each = [&](auto&& f) {
      for (int64_t i = 0; i < part.batch * part.heads; ++i) {
        const int64_t b = i / part.heads, h = i % part.heads;
        if (at[b] >= 0 && from[b] != b) f(b, h, copies.data() + i * bytes);
      }
    };
    each([&](int64_t b, int64_t h, char* to) {
      std::memcpy(to, tensor.at(from[b], h, at[b]), bytes);
    });
    each([&](int64_t b, int64_t h, const char* copy) {
      std::memcpy(tensor.at(b, h, at[b]), copy, bytes);
    });
  }
}

// --- reading ---

Tensor read(const GivenPart& given, int64_t length, ScalarType out_dtype,
            const std::optional<Tensor>& block_table) {
  constexpr int64_t kStepsPerElement = 16;  // in parallel.h's unit
  const Dtype dtype = dtype_of(given.op, out_dtype);
  const CachePart part = part_of(given);
  check_length(given.op, length, part.capacity);
  const CheckedTable table(given.op, block_table, part);
  Tensor y = empty_on_cpu({part.batch, part.heads, length, part.d}, out_dtype);
  if (y.numel() == 0) return y;
  char* out = static_cast<char*>(y.mutable_data_ptr());
  const int64_t bytes = length * part.d * size_of(dtype);
  const Kernels& kernels = kernels_of(current_isa());
  parallel(part.batch * part.heads, y.numel() * kStepsPerElement, [&](int64_t i, int64_t end) {
    for (; i < end; ++i) {
      read_cache(kernels, given.kind, part, table.get(), length, dtype, out + i * bytes, i);
    }
  });
  return y;
}

Tensor kv_keys(Tensor keys, Tensor key_scale, int64_t length, ScalarType out_dtype,
               std::optional<Tensor> block_table) {
  return read({"kv_keys", CacheKind::kKeys, keys, key_scale}, length, out_dtype, block_table);
}

Tensor kv_values(Tensor values, Tensor value_scale, int64_t length, ScalarType out_dtype,
                 std::optional<Tensor> block_table) {
  return read({"kv_values", CacheKind::kValues, values, value_scale}, length, out_dtype,
              block_table);
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

// Attention with a block table finds the block of another sequence by one distance for codes and
// scales, of keys and of values.
void check_whole(const char* op, std::initializer_list<Tensor> cache) {
  const int64_t capacity = cache.begin()[1].size(2);
  for (const Tensor& t : cache) {
    STD_TORCH_CHECK(t.is_contiguous(), op,
                    ": a block_table is given, and a tensor of the cache with shape ", shape_of(t),
                    " is not contiguous");
  }
  STD_TORCH_CHECK(cache.begin()[3].size(2) == capacity, op,
                  ": a block_table is given, and keys have room for ", capacity,
                  " tokens but values for ", cache.begin()[3].size(2));
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
                    std::optional<Tensor> mask, double scale, int64_t length, ScalarType out_dtype,
                    std::optional<Tensor> block_table, double softcap) {
  constexpr const char* op = "kv_attention";
  CacheAttention a = {};
  a.softcap = softcap_of(op, softcap);
  a.dtype = dtype_of(op, out_dtype);
  a.keys = part_of({op, CacheKind::kKeys, keys, key_scale});
  a.values = part_of({op, CacheKind::kValues, values, value_scale});
  check_queries(op, q, a.keys, a.values);
  check_length(op, length, std::min(a.keys.capacity, a.values.capacity));
  if (mask.has_value()) check_mask(op, *mask, q, length);
  if (block_table.has_value()) check_whole(op, {keys, key_scale, values, value_scale});
  const CheckedTable table(op, block_table, a.keys);
  a.table = table.get();
  q = with_contiguous_rows(q);
  Tensor y = empty_on_cpu({q.size(0), q.size(1), q.size(2), a.values.d}, out_dtype);
  if (y.numel() == 0) return y;
  a.q = vectors_of(op, q);
  a.group = q.size(1) / a.keys.heads;
  a.length = length;
  if (mask.has_value()) take_mask(*mask, &a);
  a.scale = static_cast<float>(scale);
  a.out = static_cast<char*>(y.mutable_data_ptr());
  attend_to_cache(kernels_of(current_isa()), a);
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(qfx, CPU, m) {
  implement<"kv_write", &kv_write>(m);
  implement<"kv_copy_blocks", &kv_copy_blocks>(m);
  implement<"kv_keys", &kv_keys>(m);
  implement<"kv_values", &kv_values>(m);
  implement<"kv_attention", &kv_attention>(m);
}

}  // namespace
}  // namespace qfx::cpu
