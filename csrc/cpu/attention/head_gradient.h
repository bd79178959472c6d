// The gradients of one head of keys and of the queries that share it, some queries at a time: what
// a block of queries needs is in head_gradient_rows.cpp.
#pragma once

#include "cpu/attention/backward.h"
#include "cpu/attention/keys.h"
#include "cpu/attention/transposed_codes.h"
#include "cpu/kernels/tables/attention.h"

namespace qfx::cpu {

class HeadGradient {
 public:
  HeadGradient(const Kernels& kernels, const AttentionGradient& all);
  ~HeadGradient();
  HeadGradient(const HeadGradient&) = delete;
  HeadGradient& operator=(const HeadGradient&) = delete;

  // The gradients of all queries of a head of keys, and of the keys.
  void run(int64_t head);

  // Those of one head of queries; sums[partial_size()] gets its part of those of the keys.
  void run_query(int64_t query, float* sums);

  // The gradients of the keys: the sum of the parts of the queries that share them, in their order.
  void store(int64_t head, const float* parts);

  int64_t partial_size() const { return partial_size_; }

 private:
  static constexpr int64_t kRows = 64;  // of queries at a time: the depth of a product

  // Rows of codes of x, rotated, arranged for products with panels of keys.
  struct Operand {
    RowsMemory memory;
    Rows rows;
    float scale[kRows];
  };
  // Codes of a block's weights, or of the gradients of its scores: rows, and with the rows
  // contracted.
  struct Codes {
    int8_t *rows, *panels;
    int32_t* sums;
    float scale[kRows];
  };

  void open(int64_t head, const char* mask);
  void center_keys(const char* mask);
  void add_query(int64_t query);
  void add_to_total(const float* part);
  const float* mean(const FloatMatrix& x, float* out) const;
  void open_keys(const FloatMatrix& x, const KeyPanels& panels) const;
  void add_block(int64_t query, int64_t first, int64_t count);
  int64_t look(int64_t query, int64_t first, int64_t count);
  void quantize(const FloatMatrix& x, int64_t first, int64_t count, Operand* out);
  void score(const Operand& rows, const KeyPanels& panels, int64_t count, bool masked, float* out);
  void differentiate(int64_t count);
  void encode(const float* x, int64_t count, Codes* out);
  void contract(const FloatMatrix& x, int64_t first, int64_t count, const Codes& codes,
                const float* factor, TransposedCodes* left, float* out);
  void store_queries(int64_t query, int64_t first, int64_t count);
  void store_both(int64_t head, const float* sums);
  void store_keys(const float* transposed, const FloatMatrix& sizes, char* out);

  const Kernels& kernels_;
  const AttentionGradient& all_;
  const Attention& a_;
  int64_t n_, padded_n_, depth_n_, stride_, partial_size_ = 0, panels_ = 0, head_ = -1;
  const char* centered_under_ = nullptr;  // the mask for which keys are centered
  Operand queries_, gradients_;
  TransposedCodes keys_, of_q_, of_g_;
  Codes weights_codes_, score_codes_;
  KeyPanels k_ = {}, v_ = {};
  Scratch floats_, bytes_, integers_, centers_;
  float *weights_, *scores_, *masks_, *tops_, *ones_, *work_, *dk_, *dv_, *dq_, *k_mean_, *v_mean_,
      *total_;
  float inverse_[kRows], weight_factor_[kRows], score_factor_[kRows];
  int32_t *tiles_, *key_sums_;
  int8_t* key_blocks_;
  int64_t seen_[kRows];
  const float* mask_[kRows];
};

}  // namespace qfx::cpu
