// A cache of keys and values in codes, written, read and attended to, against the reference's (K1)
// to (K5), its operands between pages that fault.
#include "cpu/attention/cache.h"

#include <limits>

#include "harness.h"

namespace qfx::test {
namespace {

struct Shape {
  int64_t group, tokens, d, e, length;
};
constexpr Shape kShapes[] = {{1, 1, 2, 6, 1},     {3, 1, 64, 64, 33},  {4, 2, 40, 18, 16},
                             {1, 9, 8, 80, 47},   {5, 1, 128, 96, 70}, {2, 3, 18, 256, 20},
                             {2, 20, 10, 34, 50}, {2, 3, 6, 40, 1100}};
constexpr int64_t kHeads = 2;

// Codes and scales of one side, between guards.
struct Side {
  Pages codes, scale;

  CachePart at(int64_t batch, int64_t capacity, int64_t d, int bits, Place place) {
    const int64_t size = capacity * d * bits / 8, scales = capacity * (bits == 8 ? 1 : 2);
    // Scales lie as tensors do, on multiples of their size.
    const Place aligned = place == Place::kOdd ? Place::kBehindGuard : place;
    char* bytes = codes.get<char>(batch * kHeads * size, place);
    float* values = scale.get<float>(batch * kHeads * scales, aligned);
    std::memset(bytes, 0, static_cast<size_t>(batch * kHeads * size));
    std::memset(values, 0, static_cast<size_t>(batch * kHeads * scales * 4));
    return {bytes,
            reinterpret_cast<char*>(values),
            batch,
            kHeads,
            capacity,
            d,
            bits,
            {kHeads * size, size},
            {kHeads * scales * 4, scales * 4}};
  }
};

struct Case {
  Shape shape;
  int key_bits, value_bits;
  Mask::Kind kind;
  Numbers values;
  Dtype dtype;
  Place place;
};

TokenVectors vectors(Pages& pages, Numbers kind, int64_t heads, int64_t tokens, int64_t d,
                     Place place) {
  const float* data = pages.copy(numbers(kind, heads * tokens * d), place);
  return {reinterpret_cast<const char*>(data),
          Dtype::kFloat32,
          tokens,
          {heads * tokens * d * 4, tokens * d * 4, d * 4}};
}

Mask mask_of(Pages& pages, const Case& c) {
  if (c.kind == Mask::Kind::kNone) return {};
  const int64_t length = c.shape.length, size = c.shape.tokens * length;
  if (c.kind == Mask::Kind::kBool) {
    std::vector<uint8_t> kept(static_cast<size_t>(size));
    for (size_t i = 0; i < kept.size(); ++i) kept[i] = hash(i / 16) % 2 == 0 && hash(i) % 4 != 0;
    return {c.kind, reinterpret_cast<const char*>(pages.copy(kept, c.place)), length, 1};
  }
  std::vector<float> added = numbers(Numbers::kPlain, size);
  for (size_t i = 0; i < added.size(); ++i) {
    if (hash(i) % 2 == 0) added[i] = -std::numeric_limits<float>::infinity();
  }
  return {c.kind, reinterpret_cast<const char*>(pages.copy(added, c.place)), length * 4, 4};
}

// What the kernels make of a case: the cache's bytes and the results, one behind the other.
struct Made {
  std::vector<char> cache, read, attended, in_pages;
};

void append(const void* from, int64_t bytes, std::vector<char>* to) {
  const char* begin = static_cast<const char*>(from);
  to->insert(to->end(), begin, begin + bytes);
}

// The same attention to the same tokens in pages of 32, the last page first. (K7)
void attend_in_pages(const Kernels& kernels, const Case& c, CacheAttention a, const TokenVectors& k,
                     const TokenVectors& v) {
  static Side keys, values;
  constexpr int64_t kPageTokens = 32;
  const auto [group, tokens, d, e, length] = c.shape;
  const int64_t count = (length + kPageTokens - 1) / kPageTokens;
  a.keys = keys.at(count, kPageTokens, d, c.key_bits, c.place);
  a.values = values.at(count, kPageTokens, e, c.value_bits, c.place);
  std::vector<int64_t> slots;
  for (int64_t t = 0; t < length; ++t) {
    slots.push_back((count - 1 - t / kPageTokens) * kPageTokens + t % kPageTokens);
  }
  for (int64_t h = 0; h < kHeads; ++h) {
    write_pages(kernels, CacheKind::kKeys, a.keys, k, slots.data(), h);
    write_pages(kernels, CacheKind::kValues, a.values, v, slots.data(), h);
  }
  std::vector<int32_t> table;
  for (int64_t i = count; i > 0; --i) table.push_back(static_cast<int32_t>(i - 1));
  a.keys.batch = a.values.batch = 1;
  a.table = {table.data(), 0, kPageTokens / kTokens};
  attend_to_cache(kernels, a);
}

Made made_by(const Kernels& kernels, const Case& c) {
  static Side keys, values;
  static Pages k, v, q, mask, read, out;
  const auto [group, tokens, d, e, length] = c.shape;
  const int64_t capacity = (length + 15) / 16 * 16, element = element_of(c.dtype);
  const CachePart key_part = keys.at(1, capacity, d, c.key_bits, c.place),
                  value_part = values.at(1, capacity, e, c.value_bits, c.place);
  const TokenVectors k_tokens = vectors(k, c.values, kHeads, length, d, c.place),
                     v_tokens = vectors(v, c.values, kHeads, length, e, c.place);
  std::vector<int64_t> places;
  for (int64_t t = 0; t < length; ++t) places.push_back(length - 1 - t);
  CacheAttention a = {key_part,
                      value_part,
                      {},
                      vectors(q, c.values, kHeads * group, tokens, d, c.place),
                      group,
                      length,
                      mask_of(mask, c),
                      {0, 0},
                      0.25f,
                      c.key_bits == 4 ? 3.f : 0.f,
                      c.dtype,
                      nullptr};
  char* rows = static_cast<char*>(read.get(length * e, element, c.place));
  a.out = static_cast<char*>(out.get(kHeads * group * tokens * e, element, c.place));
  Made made;
  for (int64_t i = 0; i < kHeads; ++i) {
    write_cache(kernels, CacheKind::kKeys, key_part, k_tokens, {places.data(), 0}, i);
    write_cache(kernels, CacheKind::kValues, value_part, v_tokens, {places.data(), 0}, i);
    read_cache(kernels, CacheKind::kValues, value_part, {}, length, c.dtype, rows, i);
    append(rows, length * e * element, &made.read);
  }
  attend_to_cache(kernels, a);
  append(key_part.codes, kHeads * key_part.code_strides[1], &made.cache);
  append(value_part.codes, kHeads * value_part.code_strides[1], &made.cache);
  append(a.out, kHeads * group * tokens * e * element, &made.attended);
  // Tokens are read from the last to the first above.
  TokenVectors k_back = k_tokens, v_back = v_tokens;
  for (TokenVectors* x : {&k_back, &v_back}) {
    x->data += (length - 1) * x->strides[2];
    x->strides[2] = -x->strides[2];
  }
  attend_in_pages(kernels, c, a, k_back, v_back);
  append(a.out, kHeads * group * tokens * e * element, &made.in_pages);
  return made;
}

void check_case(Subject& subject, const Kernels& kernels, const Case& c) {
  subject.begin("D=" + std::to_string(c.shape.d) + " E=" + std::to_string(c.shape.e) + ", " +
                std::to_string(c.shape.length) + " tokens of " + std::to_string(c.key_bits) +
                " and " + std::to_string(c.value_bits) + " bits, operands " + name_of(c.place));
  const Made expected = made_by(kernels_of(Isa::kRef), c), found = made_by(kernels, c);
  const int64_t size = static_cast<int64_t>(expected.cache.size()), element = element_of(c.dtype);
  subject.same(found.cache.data(), expected.cache.data(), size);
  subject.same_floats(c.dtype, found.read.data(), expected.read.data(),
                      static_cast<int64_t>(expected.read.size()) / element);
  subject.same(found.in_pages.data(), found.attended.data(),
               static_cast<int64_t>(found.attended.size()));
  subject.same_floats(c.dtype, found.attended.data(), expected.attended.data(),
                      static_cast<int64_t>(expected.attended.size()) / element);
}

}  // namespace

void check_cache(const Kernels& kernels) {
  Subject subject(std::string("cache__") + kernels.isa);
  int i = 0;
  for (Place place : kPlaces) {
    for (const Shape& shape : kShapes) {
      for (Mask::Kind kind : {Mask::Kind::kNone, Mask::Kind::kFloat, Mask::Kind::kBool}) {
        for (int bits : {0, 1, 2, 3}) {
          const Numbers values = bits == 1 ? Numbers::kNotFinite : Numbers::kPlain;
          check_case(
              subject, kernels,
              {shape, bits % 2 ? 4 : 8, bits / 2 ? 4 : 8, kind, values, kDtypes[i++ % 3], place});
        }
      }
    }
  }
  subject.passed();
}

}  // namespace qfx::test
