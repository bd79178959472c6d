// Rows of queries against a head of a cache, a few at a time, part by part of its tokens.
// (K3) to (K5)
#pragma once

#include <limits>

#include "cpu/attention/cache_codes.h"
#include "cpu/gemm/gemm.h"
#include "cpu/kernels/tables/attention.h"

namespace qfx::cpu {

inline constexpr float kHiddenScore = -std::numeric_limits<float>::infinity();

// What a part of the tokens gives each of some rows.
struct CachePartial {
  CacheSums* sums;  // [rows]
  float* y;         // [rows][Ep]
};

// What a loaded mask has for a quad: zeros, minus infinity for all keys, or something else.
enum class QuadMask : uint8_t { kZeros, kHidden, kSome };

// Works in memory of the calling thread: one of these at a time.
class CacheRows {
 public:
  // For at most `rows` rows at a time, or fewer: as many as rows() says.
  CacheRows(const Kernels& kernels, const CacheAttention& attention, int64_t rows);
  ~CacheRows();
  CacheRows(const CacheRows&) = delete;
  CacheRows& operator=(const CacheRows&) = delete;

  int64_t rows() const { return rows_; }

  // Rows first..first + count, count <= rows(), of the queries that share head i of keys.
  void load(int64_t i, int64_t first, int64_t count);

  // One part for these rows.
  void attend(CacheCodes& codes, int64_t part, const CachePartial& out);

  // The rows of outputs, from all parts.
  void store(const CachePartial& all) const;

 private:
  struct Query {
    int64_t b, h, t;
  };
  struct Quads {
    int64_t first, end;
  };

  Query query(int64_t r) const;
  void quantize(int64_t r);
  void look();
  void load_slot(const Mask& mask, int64_t t, int64_t slot);
  const float* added(int64_t r, int64_t quad) const;
  Quads seen_in(int64_t part) const;
  void multiply_keys(CacheCodes& codes, int64_t part, int64_t quad, const CachePartCodes& here);
  void score(CacheCodes& codes, int64_t part, const Quads& quads, const CachePartCodes& here);
  void softmax(const CachePartCodes& codes, const Quads& quads, const CachePartial& out);
  bool bytes_for(const Rows& rows, int64_t r, int64_t count, uint8_t** high, uint8_t** low) const;
  void arrange(const Rows& rows, int64_t r, int64_t count, int less, uint8_t* high, uint8_t* low);
  void multiply_values(const CacheCodes& of, const CachePartCodes& codes, const Quads& quads);
  void mix(const CacheCodes& of, const CachePartCodes& codes, const Quads& quads, float* y);

  static constexpr int64_t kStride = kPart + 16;  // of rows of scores: they share no cache sets

  const Kernels& kernels_;
  const CacheAttention& a_;
  bool few_;    // rows, which are multiplied with the codes where they lie,
  bool words_;  // in words of 16 bits
  int64_t rows_, quads_, head_ = 0, first_ = 0, count_ = 0, slots_ = 0;
  Rows queries_, probabilities_;
  float *scores_, *masks_, *query_floats_, *tops_;
  int32_t *tiles_, *value_sums_;
  uint8_t *codes_, *seen_;  // seen_: [quads], by any of the rows
  float row_scale_[kMaxTileRows], row_sum_[kMaxTileRows], greatest_[kMaxTileRows],
      factor_[kMaxTileRows];
  QuadMask* kinds_;                   // [slots][quads]
  int64_t slot_[kMaxTileRows];        // of each row, where its mask is
  const char* loaded_[kMaxTileRows];  // the mask in each slot
};

}  // namespace qfx::cpu
