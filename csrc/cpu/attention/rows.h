// Rows of queries against the codes of a head of keys, from scores to outputs, a few at a time, in
// cache.
#pragma once

#include "cpu/attention/keys.h"
#include "cpu/gemm/gemm.h"
#include "cpu/kernels/tables/attention.h"

namespace qfx::cpu {

// Works in memory of the calling thread: one of these at a time.
class AttentionRows {
 public:
  // For at most `rows` rows at a time, or fewer: as many as rows() says.
  AttentionRows(const Kernels& kernels, const Attention& attention, int64_t rows);
  ~AttentionRows();
  AttentionRows(const AttentionRows&) = delete;
  AttentionRows& operator=(const AttentionRows&) = delete;

  int64_t rows() const { return rows_; }

  // Rows first..first + count, count <= rows(), of the queries that share a head of keys.
  void run(int64_t head, const HeadCodes& codes, int64_t first, int64_t count);

 private:
  // Rows m, m + 1, ... of a head of queries are rows `at`, ... of this block.
  struct Part {
    const QueryHead* head;
    int64_t m, at, count;
  };

  void cut(int64_t head, int64_t first, int64_t count);
  void quantize(const Part& part);
  PanelRange look(const Part& part);
  void score(const HeadCodes& codes, int64_t count, const PanelRange& panels);
  int64_t seen_by_all(int64_t count) const;
  void softmax(const HeadCodes& codes, int64_t count, const PanelRange& panels);
  void arrange(const float* u, float factor, int64_t row, int64_t low_row, int64_t width);
  void mix(const HeadCodes& codes, int64_t count, const PanelRange& panels);
  void store(const Part& part) const;

  const Kernels& kernels_;
  const Attention& a_;
  int64_t rows_, width_, score_stride_, output_width_;
  std::vector<Part> parts_;
  Rows queries_, probabilities_;
  float *scores_, *mask_, *outputs_, *query_floats_, *tops_;
  float row_scale_[kMaxTileRows], greatest_[kMaxTileRows], factor_[kMaxTileRows];
  int32_t *tiles_, *value_sums_;
  int8_t* codes_;
  const float* masks_[kMaxTileRows];  // of each row, loaded; or null
  int64_t keys_[kMaxTileRows];        // those that causality leaves to each row
};

}  // namespace qfx::cpu
