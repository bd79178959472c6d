// kv_write_pages and kv_attention_pages on the CPU: a cache in pages of equally many tokens, which
// texts of any lengths take as they grow.
#include <algorithm>
#include <vector>

#include "cpu/core/parallel.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/ops/alias_check.h"
#include "cpu/ops/kv_operands.h"
#include "cpu/ops/matrices.h"
#include "implement.h"

namespace qfx::cpu {
namespace {

// [tokens, heads, D] as heads of one sequence.
TokenVectors vectors_of(const char* op, const Tensor& x) {
  const int64_t element = x.element_size();
  return {static_cast<const char*>(x.const_data_ptr()),
          dtype_of(op, x.scalar_type()),
          x.size(0),
          {0, x.stride(1) * element, x.stride(0) * element}};
}

// A copy of the integers of a vector: what is read to check them and what is used must be the same,
// whoever else holds their memory.
template <typename T>
std::vector<T> copy_of(const Tensor& t) {
  const T* from = static_cast<const T*>(t.const_data_ptr());
  std::vector<T> copy;
  copy.reserve(t.numel());
  for (int64_t i = 0; i < t.numel(); ++i) copy.push_back(from[i * t.stride(0)]);
  return copy;
}

// --- writing ---

void check_written(const GivenPart& given, const char* what, const Tensor& x, const CachePart& part,
                   const Tensor& slots) {
  check_float(given.op, what, x);
  const bool fits = x.dim() == 3 && x.size(1) == part.heads && x.size(2) == part.d &&
                    slots.dim() == 1 && slots.size(0) == x.size(0);
  STD_TORCH_CHECK(fits, given.op, ": ", what, " has shape ", shape_of(x), " and slots ",
                  shape_of(slots), ", expected Nx", part.heads, "x", part.d, " and N, as ",
                  given.name(), " with shape ", shape_of(given.codes), " and ", part.bits,
                  " bits hold");
}

void check_same_pages(const char* op, const CachePart& keys, const CachePart& values) {
  STD_TORCH_CHECK(
      keys.batch == values.batch && keys.heads == values.heads && keys.capacity == values.capacity,
      op, ": keys are ", keys.batch, " pages of ", keys.heads, " heads and ", keys.capacity,
      " tokens, but values ", values.batch, " of ", values.heads, " and ", values.capacity);
  STD_TORCH_CHECK(keys.capacity > 0, op, ": pages of 0 tokens, expected multiples of 16");
}

void kv_write_pages(Tensor keys, Tensor key_scale, Tensor values, Tensor value_scale, Tensor k,
                    Tensor v, Tensor slots) {
  constexpr const char* op = "kv_write_pages";
  constexpr int64_t kStepsPerElement = 32;  // in parallel.h's unit
  const GivenPart of_keys = {op, CacheKind::kKeys, keys, key_scale},
                  of_values = {op, CacheKind::kValues, values, value_scale};
  const CachePart key_part = part_of(of_keys), value_part = part_of(of_values);
  check_same_pages(op, key_part, value_part);
  check_dtype(op, "slots", slots, {ScalarType::Long});
  check_written(of_keys, "k", k, key_part, slots);
  check_written(of_values, "v", v, value_part, slots);
  const Written written(
      op,
      {{"keys", keys}, {"key_scale", key_scale}, {"values", values}, {"value_scale", value_scale}});
  const std::vector<int64_t> at = copy_of<int64_t>(slots);
  const int64_t room = key_part.batch * key_part.capacity;
  for (const int64_t slot : at) {
    STD_TORCH_CHECK(slot >= Places::kNowhere && slot < room, op, ": slots has ", slot,
                    ", which is outside 0..", room - 1, ": the cache has ", key_part.batch,
                    " pages of ", key_part.capacity, " tokens, and -1 writes none");
  }
  if (at.empty()) return;
  k = with_contiguous_rows(written.apart_from(k));
  v = with_contiguous_rows(written.apart_from(v));
  const TokenVectors k_tokens = vectors_of(op, k), v_tokens = vectors_of(op, v);
  const Kernels& kernels = kernels_of(current_isa());
  parallel(key_part.heads, (k.numel() + v.numel()) * kStepsPerElement, [&](int64_t h, int64_t end) {
    for (; h < end; ++h) {
      write_pages(kernels, CacheKind::kKeys, key_part, k_tokens, at.data(), h);
      write_pages(kernels, CacheKind::kValues, value_part, v_tokens, at.data(), h);
    }
  });
}

// --- attention ---

// The texts of a call: queries starts[s]..starts[s + 1] see the first lengths[s] tokens, which lie
// in the pages from first[s] on.
struct Texts {
  std::vector<int32_t> starts, lengths, pages;
  std::vector<int64_t> first;

  int64_t count() const { return static_cast<int64_t>(lengths.size()); }
  int64_t queries(int64_t s) const { return starts[s + 1] - starts[s]; }
};

void check_starts(const char* op, const std::vector<int32_t>& starts, int64_t tokens) {
  int64_t before = 0;
  for (const int32_t start : starts) {
    STD_TORCH_CHECK(start >= before && start <= tokens, op, ": starts has ", start, " behind ",
                    before, ", expected the first query of each text, in order, of ", tokens);
    before = start;
  }
}

// Appends the pages that text s needs.
void take_pages(const char* op, const Tensor& pages, const CachePart& part, int64_t s,
                Texts* texts) {
  const int64_t length = texts->lengths[s], used = (length + part.capacity - 1) / part.capacity;
  STD_TORCH_CHECK(length >= texts->queries(s) && used <= pages.size(1), op, ": text ", s, " has ",
                  texts->queries(s), " queries and ", length, " keys in ", pages.size(1),
                  " pages of ", part.capacity,
                  " tokens, expected room for its keys, and a key for each query");
  texts->first.push_back(static_cast<int64_t>(texts->pages.size()));
  const int32_t* row = static_cast<const int32_t*>(pages.const_data_ptr()) + s * pages.stride(0);
  for (int64_t i = 0; i < used; ++i) {
    const int32_t page = row[i * pages.stride(1)];
    STD_TORCH_CHECK(page >= 0 && page < part.batch, op, ": text ", s, " has page ", page,
                    ", which is outside 0..", part.batch - 1);
    texts->pages.push_back(page);
  }
}

Texts texts_of(const char* op, const Tensor& pages, const Tensor& starts, const Tensor& lengths,
               const CachePart& part, int64_t tokens) {
  check_dtype(op, "pages", pages, {ScalarType::Int});
  check_dtype(op, "starts", starts, {ScalarType::Int});
  check_dtype(op, "lengths", lengths, {ScalarType::Int});
  const bool fits = pages.dim() == 2 && starts.dim() == 1 && lengths.dim() == 1 &&
                    lengths.size(0) == pages.size(0) && starts.size(0) == pages.size(0) + 1;
  STD_TORCH_CHECK(fits, op, ": pages has shape ", shape_of(pages), ", starts ", shape_of(starts),
                  " and lengths ", shape_of(lengths), ", expected SxM, S+1 and S for S texts");
  Texts texts = {copy_of<int32_t>(starts), copy_of<int32_t>(lengths), {}, {}};
  check_starts(op, texts.starts, tokens);
  for (int64_t s = 0; s < texts.count(); ++s) take_pages(op, pages, part, s, &texts);
  return texts;
}

// Flags that a mask of any text is cut from: key n of row t is at n - t, so that a row begins one
// before that of the row above. Query t of T sees keys up to length - T + t, `window` of them.
class CausalFlags {
 public:
  CausalFlags(const Texts& texts, int64_t window) : window_(window) {
    for (const int32_t length : texts.lengths) longest_ = std::max<int64_t>(longest_, length);
    flags_.assign(2 * longest_ + 1, 0);
    const int64_t first = window > 0 ? std::max<int64_t>(longest_ - window + 1, 0) : 0;
    std::fill(flags_.begin() + first, flags_.begin() + longest_ + 1, uint8_t{1});
  }

  Mask of(int64_t queries, int64_t length) const {
    if (queries <= 1 && (window_ == 0 || window_ >= length)) return {};
    // Row 0 sees key length - queries last, which is flag `longest`.
    const char* data = reinterpret_cast<const char*>(flags_.data()) + longest_ - length + queries;
    return {Mask::Kind::kBool, data, -1, 1};
  }

 private:
  std::vector<uint8_t> flags_;
  int64_t longest_ = 0, window_;
};

void attend_to_pages(const CacheAttention& all, const Texts& texts, int64_t window) {
  const Kernels& kernels = kernels_of(current_isa());
  const CausalFlags flags(texts, window);
  const int64_t row = all.keys.heads * all.group * all.values.d * size_of(all.dtype);
  const auto work = [&](int64_t s) { return texts.queries(s) * texts.lengths[s]; };
  const auto attend = [&](int64_t s) {
    CacheAttention a = all;
    a.keys.batch = a.values.batch = 1;
    a.table.at = texts.pages.data() + texts.first[s];
    a.q.data += texts.starts[s] * a.q.strides[2];
    a.q.tokens = texts.queries(s);
    a.length = texts.lengths[s];
    a.mask = flags.of(a.q.tokens, a.length);
    a.out += texts.starts[s] * row;
    attend_to_cache(kernels, a);
  };
  int64_t total = 0;
  for (int64_t s = 0; s < texts.count(); ++s) total += work(s);
  // What is more than one thread's share is divided among all; the rest is dealt out whole.
  const int64_t threads =
      threads_for(total * all.keys.heads * all.group * (all.keys.d + all.values.d));
  std::vector<int64_t> small;
  for (int64_t s = 0; s < texts.count(); ++s) {
    if (work(s) * threads > total) {
      attend(s);
    } else {
      small.push_back(s);
    }
  }
  const int64_t count = static_cast<int64_t>(small.size());
  if (count == 0) return;
  const int64_t shares = std::min(threads, count);
  on_threads(shares, [&](int64_t i) {
    for (int64_t at = i; at < count; at += shares) attend(small[at]);
  });
}

Tensor kv_attention_pages(Tensor q, Tensor keys, Tensor key_scale, Tensor values,
                          Tensor value_scale, Tensor pages, Tensor starts, Tensor lengths,
                          double scale, int64_t window, ScalarType out_dtype, double softcap) {
  constexpr const char* op = "kv_attention_pages";
  CacheAttention a = {};
  a.softcap = softcap_of(op, softcap);
  a.dtype = dtype_of(op, out_dtype);
  a.keys = part_of({op, CacheKind::kKeys, keys, key_scale});
  a.values = part_of({op, CacheKind::kValues, values, value_scale});
  check_same_pages(op, a.keys, a.values);
  check_float(op, "q", q);
  const bool fits = q.dim() == 3 && q.size(2) == a.keys.d &&
                    (a.keys.heads == 0 ? q.size(1) == 0 : q.size(1) % a.keys.heads == 0);
  STD_TORCH_CHECK(fits, op, ": q has shape ", shape_of(q), ", expected NxHqx", a.keys.d,
                  ", Hq a multiple of the ", a.keys.heads, " heads of keys");
  STD_TORCH_CHECK(window >= 0, op, ": window=", window,
                  ", expected the number of keys that a query sees, or 0 for all");
  const Texts texts = texts_of(op, pages, starts, lengths, a.keys, q.size(0));
  q = with_contiguous_rows(q);
  Tensor y = empty_on_cpu({q.size(0), q.size(1), a.values.d}, out_dtype);
  if (y.numel() == 0) return y;
  a.q = vectors_of(op, q);
  a.group = q.size(1) / a.keys.heads;
  a.scale = static_cast<float>(scale);
  a.out = static_cast<char*>(y.mutable_data_ptr());
  a.heads_last = true;
  a.table.page = a.keys.capacity / kTokens;
  const int64_t row = y.stride(0) * y.element_size(), first = texts.starts.front();
  std::fill_n(a.out, first * row, char{0});  // queries of no text are 0
  std::fill_n(a.out + texts.starts.back() * row, (q.size(0) - texts.starts.back()) * row, char{0});
  attend_to_pages(a, texts, window);
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(qfx, CPU, m) {
  implement<"kv_write_pages", &kv_write_pages>(m);
  implement<"kv_attention_pages", &kv_attention_pages>(m);
}

}  // namespace
}  // namespace qfx::cpu
