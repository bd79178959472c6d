// A cache of keys and values in codes of 8 or 4 bits: written, read, attended to. (K1) to (K5)
#pragma once

#include <cstdint>

#include "cpu/attention/mask.h"
#include "cpu/gemm/quantize.h"
#include "cpu/kernels/tables/cache.h"

namespace qfx::cpu {

// The keys or the values of a head; kernels/tables/cache.h has their layout.
struct CacheHead {
  uint8_t* codes;
  float* scale;
};

// The keys or the values of all heads of a batch; strides in bytes.
struct CachePart {
  char *codes, *scale;
  int64_t batch, heads, capacity, d;
  int bits;
  int64_t code_strides[2], scale_strides[2];  // of batch and heads

  CacheHead head(int64_t i) const { return head(i / heads, i % heads); }
  CacheHead head(int64_t b, int64_t h) const {
    return {
        reinterpret_cast<uint8_t*>(codes + b * code_strides[0] + h * code_strides[1]),
        reinterpret_cast<float*>(scale + b * scale_strides[0] + h * scale_strides[1]),
    };
  }
  int64_t bytes_of_token() const { return d * bits / 8; }
  int64_t scales_of_token() const { return bits == 8 ? 1 : 2; }
};

// Vectors [batch, heads, tokens, D], each contiguous; strides in bytes.
struct TokenVectors {
  const char* data;
  Dtype dtype;
  int64_t tokens, strides[3];

  const char* at(int64_t b, int64_t h, int64_t t) const {
    return data + b * strides[0] + h * strides[1] + t * strides[2];
  }
};

enum class CacheKind { kKeys, kValues };

// Where the tokens of each sequence are written: [batch][tokens], `stride` apart, 0 where all
// sequences have the same places. A token at kNowhere is not written.
struct Places {
  static constexpr int64_t kNowhere = -1;
  const int64_t* at;
  int64_t stride;
};

// The tokens of head i take their places, which lie below the capacity. (K1)
void write_cache(const Kernels& kernels, CacheKind kind, const CachePart& part,
                 const TokenVectors& x, const Places& places, int64_t i);

// Which sequence's memory holds each block of 16 tokens of each sequence: [batch][capacity / 16],
// `stride` apart; null where every sequence holds its own. In a cache of pages those are the
// "sequences", and the table has the page of each `page` blocks of the one text it is for.
struct BlockTable {
  const int32_t* at = nullptr;
  int64_t stride = 0, page = 0;

  int64_t row(int64_t b, int64_t block) const { return at == nullptr ? b : at[b * stride + block]; }
};

// Token t of x, [1, heads, tokens, D], takes place t of a head: slots[t], counted through all pages
// of a cache, which are the "sequences" of `part`. (K7)
void write_pages(const Kernels& kernels, CacheKind kind, const CachePart& part,
                 const TokenVectors& x, const int64_t* slots, int64_t h);

// The first `length` tokens of head i, [length][D]. (K2)
void read_cache(const Kernels& kernels, CacheKind kind, const CachePart& part,
                const BlockTable& table, int64_t length, Dtype dtype, char* out, int64_t i);

struct CacheAttention {
  CachePart keys, values;  // with a table, whole: sequences lie heads * capacity tokens apart
  BlockTable table;
  TokenVectors q;  // of `group` times as many heads
  int64_t group, length;
  Mask mask;                // of the first head of queries of the first sequence
  int64_t mask_strides[2];  // of batch and heads of queries, in bytes
  float scale, softcap;     // softcap: scores lie below it in size; 0 for any
  Dtype dtype;
  char* out;  // [batch, heads of queries, tokens, E], or with the heads behind the tokens
  bool heads_last = false;
};

// On several threads. (K3) to (K5)
void attend_to_cache(const Kernels& kernels, const CacheAttention& attention);

// R of the largest power of two that divides n; 0 where that is 1.
int cache_rotation_of(int64_t n);

// A vector in float32, rotated.
Range rotated(const Kernels& kernels, const char* x, Dtype dtype, int64_t n, float* out);

}  // namespace qfx::cpu
