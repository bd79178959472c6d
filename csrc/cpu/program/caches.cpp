// What an int8 cache of keys and values is for: written to, attended to.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/attention/cache.h"
#include "cpu/core/parallel.h"
#include "cpu/core/scratch.h"
#include "cpu/program/instruction.h"
#include "cpu/program/loops.h"

namespace qfx::cpu {
namespace {

// The keys or the values: codes and scales, both contiguous.
struct Part {
  Operand codes, scale;

  Part(Words& words, CacheKind kind)
      : codes(words.matrix(Element::kByte)), scale(words.matrix(Element::kFloat)) {
    const bool keys = kind == CacheKind::kKeys;
    expect(scale.axes == 4 && (scale.size(3) == 1 || scale.size(3) == 2) &&
               scale.size(2) % kTokens == 0 && codes.axes == (keys ? 5 : 4) &&
               codes.size(0) == scale.size(0) && codes.size(1) == scale.size(1),
           "a cache of another shape");
    expect(d() > 0, "a cache of vectors without features");
    expect(keys ? codes.size(4) == kTokens && codes.size(2) * kTokens == scale.size(2)
                : codes.size(2) == scale.size(2),
           "a cache of another length");
  }

  int64_t d() const { return codes.size(3) * (scale.size(3) == 1 ? 1 : 2); }
  int64_t capacity() const { return scale.size(2); }

  CachePart in(char* const* slots) const {
    return {codes.in<char>(slots),
            scale.in<char>(slots),
            codes.size(0),
            codes.size(1),
            capacity(),
            d(),
            scale.size(3) == 1 ? 8 : 4,
            {codes.stride(0), codes.stride(1)},
            {scale.stride(0) * 4, scale.stride(1) * 4}};
  }
};

void expect_same_heads(const Part& keys, const Part& values) {
  expect(keys.scale.size(0) == values.scale.size(0) && keys.scale.size(1) == values.scale.size(1),
         "keys and values of different heads");
}

TokenVectors vectors_in(char* const* slots, const Operand& x) {
  return {x.in<char>(slots),
          Dtype::kFloat32,
          x.size(2),
          {x.stride(0) * 4, x.stride(1) * 4, x.stride(2) * 4}};
}

// [B, H, T, D] of a cache's sizes, its rows contiguous.
Operand vectors_of(Words& words, const Part& part) {
  const Operand x = words.operand(Element::kFloat);
  expect(x.axes == 4 && x.size(0) == part.scale.size(0) && x.size(3) == part.d() &&
             (x.stride(3) == 1 || x.size(3) == 1),
         "vectors of another cache");
  return x;
}

struct Write final : Instruction {
  Part keys, values;
  Operand k, v, places;

  explicit Write(Words& words)
      : keys(words, CacheKind::kKeys),
        values(words, CacheKind::kValues),
        k(vectors_of(words, keys)),
        v(vectors_of(words, values)),
        places(words.matrix(Element::kLong)) {
    const int64_t batch = keys.scale.size(0), tokens = k.size(2);
    for (const Part* part : {&keys, &values})
      words.written(part->codes), words.written(part->scale);
    expect_same_heads(keys, values);
    expect(k.size(1) == keys.scale.size(1) && v.size(1) == keys.scale.size(1) &&
               v.size(2) == tokens && places.size(-1) == tokens &&
               (places.axes == 1 || (places.axes == 2 && places.size(0) == batch)),
           "vectors of another cache");
  }

  double work() const override {
    return static_cast<double>(places.elements() + k.elements() + v.elements());
  }

  void run(const Kernels& kernels, char* const* slots) const override {
    if (places.elements() == 0) return;
    // A copy: a file's program may have them where it writes.
    thread_local Scratch scratch;
    const int64_t count = places.elements();
    int64_t* at = scratch.get<int64_t>(count);
    std::copy_n(places.in<int64_t>(slots), count, at);
    const int64_t room = std::min(keys.capacity(), values.capacity());
    for (int64_t t = 0; t < count; ++t) {
      if (at[t] < Places::kNowhere || at[t] >= room) {
        throw std::out_of_range("a token is to be written to place " + std::to_string(at[t]) +
                                " of a cache that has room for " + std::to_string(room));
      }
    }
    const CachePart key_part = keys.in(slots), value_part = values.in(slots);
    const TokenVectors k_tokens = vectors_in(slots, k), v_tokens = vectors_in(slots, v);
    const Places where = {at, places.axes == 1 ? 0 : k.size(2)};
    const int64_t heads = key_part.batch * key_part.heads;
    const int64_t work = work_of_elements(k.elements()) + work_of_elements(v.elements());
    parallel(heads, work, [&](int64_t i, int64_t end) {
      for (; i < end; ++i) {
        write_cache(kernels, CacheKind::kKeys, key_part, k_tokens, where, i);
        write_cache(kernels, CacheKind::kValues, value_part, v_tokens, where, i);
      }
    });
  }
};

// Keys from here on no query of a mask sees, in whole blocks. bool [B, H, T, length], the same for
// all heads, each row contiguous.
int64_t seen_of(const Operand& mask, char* const* slots) {
  const int64_t length = mask.size(3);
  int64_t seen = 0;
  for (int64_t b = 0; b < mask.size(0); ++b) {
    for (int64_t t = 0; t < mask.size(2); ++t) {
      const char* row = mask.in<char>(slots) + b * mask.stride(0) + t * mask.stride(2);
      int64_t end = length;
      while (end > seen && row[end - 1] == 0) {
        uint64_t eight = 1;
        if (end >= seen + 8) std::memcpy(&eight, row + end - 8, 8);
        end -= eight == 0 ? 8 : 1;
      }
      seen = end;
    }
  }
  return std::min(length, (seen + kTokens - 1) / kTokens * kTokens);
}

struct Attend final : Instruction {
  Part keys, values;
  Operand q, out, mask = {}, table = {};
  bool has_mask, has_table = false;
  float scale, softcap;
  int64_t length;

  explicit Attend(Words& words)
      : keys(words, CacheKind::kKeys),
        values(words, CacheKind::kValues),
        q(vectors_of(words, keys)),
        out(words.written(words.matrix(Element::kFloat))),
        has_mask(words.take() != 0) {
    if (has_mask) mask = words.operand();
    scale = words.take_float();
    length = words.take();
    has_table = words.take() != 0;
    if (has_table) table = words.matrix(Element::kInt);
    softcap = words.take_float();
    expect(softcap == 0.f || (std::isnormal(softcap) && softcap > 0.f),
           "a softcap that is no size of scores");
    expect_same_heads(keys, values);
    expect(!has_table ||
               (table.axes == 2 && table.size(0) == q.size(0) &&
                table.size(1) * kTokens == keys.capacity() && keys.capacity() == values.capacity()),
           "a block table of another cache");
    const int64_t heads = keys.scale.size(1);
    expect(heads > 0 && q.size(1) % heads == 0 && out.axes == 4 && out.size(0) == q.size(0) &&
               out.size(1) == q.size(1) && out.size(2) == q.size(2) && out.size(3) == values.d() &&
               length >= 0 && length <= std::min(keys.capacity(), values.capacity()),
           "an attention of other sizes");
    const bool known = mask.element == Element::kByte || mask.element == Element::kFloat;
    expect(!has_mask ||
               (known && mask.axes == 4 && mask.size(0) == q.size(0) && mask.size(1) == q.size(1) &&
                mask.size(2) == q.size(2) && mask.size(3) == length),
           "a mask of other sizes");
  }

  double work() const override {
    const int64_t queries = q.size(0) * q.size(1) * q.size(2);
    return static_cast<double>(queries) * static_cast<double>(length) *
           static_cast<double>(keys.d() + values.d());
  }

  // A copy: a file's program may have it where it writes.
  BlockTable checked_table(char* const* slots) const {
    thread_local Scratch scratch;
    const int64_t count = table.elements(), batch = keys.scale.size(0);
    int32_t* rows = scratch.get<int32_t>(count);
    std::copy_n(table.in<int32_t>(slots), count, rows);
    for (int64_t i = 0; i < count; ++i) {
      if (rows[i] < 0 || rows[i] >= batch) {
        throw std::out_of_range("a block table has sequence " + std::to_string(rows[i]) +
                                ", and the cache holds " + std::to_string(batch));
      }
    }
    return {rows, table.size(1)};
  }

  void run(const Kernels& kernels, char* const* slots) const override {
    CacheAttention a = {};
    a.dtype = Dtype::kFloat32;
    a.keys = keys.in(slots);
    a.values = values.in(slots);
    a.q = vectors_in(slots, q);
    a.group = q.size(1) / a.keys.heads;
    a.length = length;
    if (has_mask) {
      const int64_t element = size_of(mask.element);
      a.mask = {element == 1 ? Mask::Kind::kBool : Mask::Kind::kFloat, mask.in<char>(slots),
                mask.stride(2) * element, mask.stride(3) * element};
      a.mask_strides[0] = mask.stride(0) * element;
      a.mask_strides[1] = mask.stride(1) * element;
      const bool plain = mask.stride(1) == 0 || mask.size(1) == 1;
      if (element == 1 && plain && mask.stride(3) == 1) a.length = seen_of(mask, slots);
    }
    if (has_table) a.table = checked_table(slots);
    a.scale = scale;
    a.softcap = softcap;
    a.out = out.in<char>(slots);
    attend_to_cache(kernels, a);
  }
};

}  // namespace

Made kv_write_of(Words& words) { return std::make_unique<Write>(words); }

Made kv_attention_of(Words& words) { return std::make_unique<Attend>(words); }

}  // namespace qfx::cpu
