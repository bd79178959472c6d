#include "cpu/attention/cache.h"

#include <algorithm>
#include <bit>

#include "cpu/core/scratch.h"
#include "cpu/gemm/pack.h"
#include "cpu/kernels/tables/attention.h"
#include "cpu/kernels/tables/code.h"

namespace qfx::cpu {

int cache_rotation_of(int64_t n) {
  const int64_t block = std::min<int64_t>(n & -n, kLargestRotation);
  return block > 1 ? static_cast<int>(block) : 0;
}

Range rotated(const Kernels& kernels, const char* x, Dtype dtype, int64_t n, float* out) {
  const float* row = reinterpret_cast<const float*>(x);
  if (dtype != Dtype::kFloat32) {
    kernels.row->widen(x, dtype, n, out);
    row = out;
  }
  const Transform transform = {nullptr, cache_rotation_of(n)};
  Range range;
  kernels.row->rotate(row, n, &transform, out, &range);
  return range;
}

namespace {

// One code for each feature, and what they are to be multiplied by. (K1)
void encode(const Kernels& kernels, int bits, const float* x, int64_t n, const Range& range,
            uint8_t* codes, float* scale) {
  if (bits == 8) {
    const RowCode code = code_of(range, {8, true, false});
    *scale = code.scale;
    return kernels.row->quantize(x, n, &code, reinterpret_cast<int8_t*>(codes));
  }
  if (range.magnitude >= kInfiniteBits) {  // (Q4)
    std::fill_n(codes, n, uint8_t{0});
    scale[0] = std::bit_cast<float>(range.magnitude);
    scale[1] = 0.f;
    return;
  }
  const float low = from_sortable(range.low), high = from_sortable(range.high);
  scale[0] = at_least(high / 15.f - low / 15.f, kSmallestScale);
  scale[1] = low + 0.f;  // not -0
  kernels.attention->cache.nibbles(x, n, scale[1], 1.f / scale[0], codes);
}

void put_key(int bits, const uint8_t* codes, int64_t n, uint8_t* out) {
  if (bits == 8) {
    for (int64_t i = 0; i < n; ++i) out[i * kTokens] = codes[i];
  } else {
    for (int64_t i = 0; i < n / 2; ++i) {
      out[i * kTokens] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
    }
  }
}

void put_value(int bits, const uint8_t* codes, int64_t n, uint8_t* out) {
  if (bits == 8) {
    std::copy_n(codes, n, out);
  } else {
    for (int64_t i = 0; i < n / 2; ++i) {
      out[i] = static_cast<uint8_t>(codes[i] | codes[i + n / 2] << 4);
    }
  }
}

// A vector takes a place of a head. (K1)
void put(const Kernels& kernels, CacheKind kind, const CachePart& part, const char* x, Dtype dtype,
         const CacheHead& head, int64_t place) {
  thread_local Scratch floats, bytes;
  const int64_t n = part.d, size = part.bytes_of_token();
  float* row = floats.get<float>(n);
  uint8_t* codes = bytes.get<uint8_t>(n);
  const Range range = rotated(kernels, x, dtype, n, row);
  encode(kernels, part.bits, row, n, range, codes, head.scale + place * part.scales_of_token());
  if (kind == CacheKind::kKeys) {
    uint8_t* block = head.codes + place / kTokens * kTokens * size;
    put_key(part.bits, codes, n, block + place % kTokens);
  } else {
    put_value(part.bits, codes, n, head.codes + place * size);
  }
}

}  // namespace

void write_cache(const Kernels& kernels, CacheKind kind, const CachePart& part,
                 const TokenVectors& x, const Places& places, int64_t i) {
  const int64_t b = i / part.heads, h = i % part.heads;
  for (int64_t t = 0; t < x.tokens; ++t) {
    const int64_t place = places.at[b * places.stride + t];
    if (place == Places::kNowhere) continue;
    put(kernels, kind, part, x.at(b, h, t), x.dtype, part.head(i), place);
  }
}

void write_pages(const Kernels& kernels, CacheKind kind, const CachePart& part,
                 const TokenVectors& x, const int64_t* slots, int64_t h) {
  for (int64_t t = 0; t < x.tokens; ++t) {
    if (slots[t] == Places::kNowhere) continue;
    const CacheHead head = part.head(slots[t] / part.capacity, h);
    put(kernels, kind, part, x.at(0, h, t), x.dtype, head, slots[t] % part.capacity);
  }
}

void read_cache(const Kernels& kernels, CacheKind kind, const CachePart& part,
                const BlockTable& table, int64_t length, Dtype dtype, char* out, int64_t i) {
  thread_local Scratch scratch;
  const int64_t n = part.d, element = dtype == Dtype::kFloat32 ? 4 : 2;
  float* floats = scratch.get<float>(kTokens * n + kPanel);
  const CacheKernels& run = kernels.attention->cache;
  for (int64_t first = 0; first < length; first += kTokens) {
    const CacheHead head = part.head(table.row(i / part.heads, first / kTokens), i % part.heads);
    const CacheBlockArgs block = {head.codes + first * part.bytes_of_token(),
                                  head.scale + first * part.scales_of_token(), part.bits, n,
                                  floats};
    (kind == CacheKind::kKeys ? run.keys : run.values)(&block);
    const FinishArgs finish = {floats,
                               n,
                               std::min<int64_t>(kTokens, length - first),
                               n,
                               cache_rotation_of(n),
                               dtype,
                               out + first * n * element};
    kernels.attention->finish_rows(&finish);
  }
}

}  // namespace qfx::cpu
