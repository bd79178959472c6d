#include "cpu/attention/cache.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

#include "cpu/core/scratch.h"
#include "cpu/gemm/pack.h"
#include "cpu/kernels/tables/attention.h"
#include "cpu/kernels/tables/code.h"

namespace qfx::cpu {
namespace {

// R of the largest power of two that divides n; 0 where that is 1.
int rotation_of(int64_t n) {
  const int64_t block = std::min<int64_t>(n & -n, kLargestRotation);
  return block > 1 ? static_cast<int>(block) : 0;
}

// A vector in float32, rotated.
Range rotated(const Kernels& kernels, const char* x, Dtype dtype, int64_t n, float* out) {
  const float* row = reinterpret_cast<const float*>(x);
  if (dtype != Dtype::kFloat32) {
    kernels.row->widen(x, dtype, n, out);
    row = out;
  }
  const Transform transform = {nullptr, rotation_of(n)};
  Range range;
  kernels.row->rotate(row, n, &transform, out, &range);
  return range;
}

// --- writing ---

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

// --- attention ---

constexpr int64_t kRowsOfPass = 32;  // queries for which the codes are streamed once

int64_t whole_blocks(int64_t n) { return round_up(n, kTokens); }

// What rows of queries of one head of keys work with.
struct Pass {
  float *q, *q_sum, *scores, *work, *y, *masks;
  int32_t* blocks;
  int64_t* stored;
  int64_t q_stride, width, y_stride;
  const char* loaded[kRowsOfPass];  // whose masks are there
  const float* added[kRowsOfPass];  // each row's mask
  SeenBlocks seen;
  int64_t seen_rows, sequence;  // those that `seen` describes
};

Pass memory_for(const CacheAttention& a, int64_t rows) {
  thread_local Scratch scratch;
  const int64_t q_stride = whole_blocks(a.keys.d), width = whole_blocks(a.length);
  const int64_t y_stride = 2 * round_up(a.values.d, kPanel);
  const int64_t masks = a.mask.kind == Mask::Kind::kNone ? 0 : rows * width;
  const int64_t blocks = width / kTokens, floats = rows * (q_stride + 1 + width + 2 * y_stride);
  float* at = scratch.get<float>(floats + masks + 3 * blocks);
  Pass pass = {};
  pass.q_stride = q_stride, pass.width = width, pass.y_stride = y_stride;
  const auto take = [&](int64_t count) { return std::exchange(at, at + count); };
  pass.stored = reinterpret_cast<int64_t*>(take(2 * blocks));
  pass.q = take(rows * q_stride);
  pass.scores = take(rows * width);
  pass.masks = take(masks);
  pass.work = take(rows * y_stride);
  pass.y = take(rows * y_stride);
  pass.q_sum = take(rows);
  pass.blocks = reinterpret_cast<int32_t*>(at);
  return pass;
}

// Row r of the queries that share a head of keys: consecutive ones are heads of one token, whose
// masks mostly are one.
struct Query {
  int64_t b, h, t;
};

Query query_of(const CacheAttention& a, int64_t i, int64_t r) {
  return {i / a.keys.heads, i % a.keys.heads * a.group + r % a.group, r / a.group};
}

// (K3): R q * scale, and the sum of its features.
void prepare_query(const Kernels& kernels, const CacheAttention& a, const Query& query, float* q,
                   float* sum) {
  const int64_t d = a.keys.d;
  rotated(kernels, a.q.at(query.b, query.h, query.t), a.q.dtype, d, q);
  float sums[16] = {};
  for (int64_t i = 0; i < d; ++i) {
    q[i] = q[i] * a.scale;
    sums[i % 16] = sums[i % 16] + q[i];
  }
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sums[i] = sums[i] + sums[i + half];
  }
  *sum = sums[0];
}

// Each row's mask, one for all that have the same, with minus infinity after the last key. Heads
// that follow mostly have those of the head before. Whether one is new.
bool load_masks(const Kernels& kernels, const CacheAttention& a, int64_t i, int64_t first,
                int64_t rows, Pass* pass) {
  int64_t slot = -1;
  bool changed = false;
  for (int64_t r = 0; r < rows; ++r) {
    const Query query = query_of(a, i, first + r);
    Mask mask = a.mask;
    mask.data += query.b * a.mask_strides[0] + query.h * a.mask_strides[1];
    const char* row = mask.row(query.t);
    if (slot < 0 || row != pass->loaded[slot]) {
      float* to = pass->masks + ++slot * pass->width;
      if (row != pass->loaded[slot]) {
        load_mask(kernels, mask, query.t, a.length, to);
        std::fill(to + a.length, to + pass->width, -std::numeric_limits<float>::infinity());
        pass->loaded[slot] = row;
        changed = true;
      }
    }
    pass->added[r] = pass->masks + slot * pass->width;
  }
  return changed;
}

bool sees_any(const float* added) {
  constexpr uint32_t kHidden = std::bit_cast<uint32_t>(-std::numeric_limits<float>::infinity());
  uint32_t any = 0;
  for (int n = 0; n < kTokens; ++n) any |= std::bit_cast<uint32_t>(added[n]) ^ kHidden;
  return any != 0;
}

// The blocks that one of the rows sees.
int64_t find_blocks(const Pass& pass, int64_t rows, bool masked) {
  int64_t count = 0;
  for (int64_t block = 0; block < pass.width / kTokens; ++block) {
    bool seen = !masked;
    for (int64_t r = 0; r < rows && !seen; ++r) {
      const bool other = r == 0 || pass.added[r] != pass.added[r - 1];
      if (other) seen = sees_any(pass.added[r] + block * kTokens);
    }
    if (seen) pass.blocks[count++] = static_cast<int32_t>(block);
  }
  return count;
}

// Where the `count` blocks in pass.blocks of sequence b lie.
void find_stored(const CacheAttention& a, int64_t b, int64_t count, const Pass& pass) {
  const int64_t between = a.keys.heads * (a.keys.capacity / kTokens);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t block = pass.blocks[i];
    pass.stored[i] = block + (a.table.row(b, block) - b) * between;
  }
}

// Which blocks rows first, first + 1, .. see: those of the rows before where nothing changed.
void see(const Kernels& kernels, const CacheAttention& a, int64_t i, int64_t first, int64_t rows,
         Pass* pass) {
  const bool masked = a.mask.kind != Mask::Kind::kNone;
  const bool changed = masked && load_masks(kernels, a, i, first, rows, pass);
  const int64_t b = i / a.keys.heads;
  const bool moved = a.table.at != nullptr && b != pass->sequence;
  if (!changed && !moved && rows == pass->seen_rows) return;
  const int64_t count = find_blocks(*pass, rows, masked);
  find_stored(a, b, count, *pass);
  pass->seen = {pass->blocks, pass->stored, count, a.length};
  pass->seen_rows = rows;
  pass->sequence = b;
}

void attend_rows(const Kernels& kernels, const CacheAttention& a, int64_t i, int64_t first,
                 int64_t rows, Pass* pass) {
  const CacheHead keys = a.keys.head(i), values = a.values.head(i);
  for (int64_t r = 0; r < rows; ++r) {
    prepare_query(kernels, a, query_of(a, i, first + r), pass->q + r * pass->q_stride,
                  pass->q_sum + r);
  }
  see(kernels, a, i, first, rows, pass);
  const SeenBlocks seen = pass->seen;
  const bool masked = a.mask.kind != Mask::Kind::kNone;
  const CacheKernels& run = kernels.attention->cache;
  const CacheScoreArgs scores = {.codes = keys.codes,
                                 .scale = keys.scale,
                                 .bits = a.keys.bits,
                                 .d = a.keys.d,
                                 .seen = seen,
                                 .q = pass->q,
                                 .q_stride = pass->q_stride,
                                 .q_sum = pass->q_sum,
                                 .added = masked ? pass->added : nullptr,
                                 .rows = rows,
                                 .softcap = a.softcap,
                                 .scores = pass->scores,
                                 .stride = pass->width};
  run.score(&scores);
  CacheSums sums[kRowsOfPass];
  for (int64_t r = 0; r < rows; ++r) {
    const CacheSoftmaxArgs args = {pass->scores + r * pass->width, values.scale, a.values.bits,
                                   seen};
    sums[r] = run.softmax(&args);
  }
  const CacheMixArgs mix = {values.codes, a.values.bits, a.values.d,    seen,
                            pass->scores, pass->width,   sums,          rows,
                            pass->work,   pass->y,       pass->y_stride};
  run.mix(&mix);
}

}  // namespace

void write_cache(const Kernels& kernels, CacheKind kind, const CachePart& part,
                 const TokenVectors& x, const Places& places, int64_t i) {
  thread_local Scratch floats, bytes;
  const int64_t n = part.d, size = part.bytes_of_token();
  float* row = floats.get<float>(n);
  uint8_t* codes = bytes.get<uint8_t>(n);
  const CacheHead head = part.head(i);
  for (int64_t t = 0; t < x.tokens; ++t) {
    const int64_t place = places.at[i / part.heads * places.stride + t];
    if (place == Places::kNowhere) continue;
    const Range range = rotated(kernels, x.at(i / part.heads, i % part.heads, t), x.dtype, n, row);
    encode(kernels, part.bits, row, n, range, codes, head.scale + place * part.scales_of_token());
    if (kind == CacheKind::kKeys) {
      uint8_t* block = head.codes + place / kTokens * kTokens * size;
      put_key(part.bits, codes, n, block + place % kTokens);
    } else {
      put_value(part.bits, codes, n, head.codes + place * size);
    }
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
                               rotation_of(n),
                               dtype,
                               out + first * n * element};
    kernels.attention->finish_rows(&finish);
  }
}

void attend_to_cache(const Kernels& kernels, const CacheAttention& a, int64_t i, int64_t end) {
  const int64_t rows = a.group * a.q.tokens, e = a.values.d, heads = a.keys.heads * a.group;
  const int64_t element = a.dtype == Dtype::kFloat32 ? 4 : 2;
  Pass pass = memory_for(a, std::min(rows, kRowsOfPass));
  for (; i < end; ++i) {
    for (int64_t first = 0; first < rows; first += kRowsOfPass) {
      const int64_t count = std::min(kRowsOfPass, rows - first);
      attend_rows(kernels, a, i, first, count, &pass);
      for (int64_t r = 0; r < count; ++r) {
        const Query query = query_of(a, i, first + r);
        const int64_t at = ((query.b * heads + query.h) * a.q.tokens + query.t) * e;
        const FinishArgs finish = {pass.y + r * pass.y_stride, e, 1, e, rotation_of(e), a.dtype,
                                   a.out + at * element};
        kernels.attention->finish_rows(&finish);
      }
    }
  }
}

}  // namespace qfx::cpu
