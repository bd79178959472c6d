// Products of rows of bytes with tensor cores, on any GPU from sm_75 on and for any M, N, K:
//     raw[b][m][n] = sum_k a[b][m][k] w[b][n][k]
// of int8 codes, or of signs as bits. What becomes of a sum is said by an Output.
#pragma once

#include <cstdint>

#include "cuda/core/stream.h"
#include "cuda/gemm/plan.h"
#include "types.h"

namespace qfx::cuda {

// The rows of an operand, of every matrix of a batch, as bytes. They begin at multiples of 16
// bytes; from K up to a multiple of 16 they are zero in one operand of a product of codes, and in
// both operands of one of signs.
struct Rows {
  const int8_t* data;
  int64_t pitch, batch_step;
};

// One value for each row, or (step 0) one for all.
template <typename T>
struct PerRow {
  const T* data;
  int64_t step;
};

// A value for each column and group of K.
template <typename T>
struct PerGroup {
  const T* data;
  int64_t column_step, group_step;
};

// A vector of floats of any type. Null: none.
struct AnyFloats {
  const void* data;
  Dtype dtype;
};

enum class OutType : int { kFloats, kIntegers, kCodes };

// Codes by (Q6).
struct CodesOut {
  CodeSpec spec;
  PerRow<float> scale;
  PerRow<int32_t> zero_point;  // null: 0
  int32_t* faults;  // [rows], raised to the greatest |y| of a row that is not finite, as bits
};

// Where the rows [batch * M][N] of a product go: floats by (E1), the exact integers, or codes.
struct Output {
  void* data;
  OutType type;
  Dtype dtype;  // of kFloats
  Activation activation;
  PerRow<float> row_scale;
  const float* col_scale;
  int64_t col_step;  // from the column scales of a matrix of the batch to those of the next
  AnyFloats bias;
  CodesOut codes;
};

// What makes a raw sum of codes exact: raw - zero_m colsum_n. (G1)
struct CodeTerms {
  PerRow<int32_t> zero;
  const int32_t* colsum;
  int64_t colsum_step;  // from a matrix of the batch to the next
};

// The same for signs: K, and how many bits of a row or a column are set. (H1)
struct SignTerms {
  uint32_t k;
  const int32_t *set_in_row, *set_in_column;
};

// The same for groups of `group` codes of K, whose sums are added up as floats. (E3)
struct GroupTerms {
  int64_t group;  // a multiple of kStepBytes
  PerRow<int32_t> zero;
  PerGroup<int32_t> colsum;
  PerGroup<float> scale;
  PerGroup<int32_t> w_zero;  // null: 0
  const int32_t* row_sums;   // [G][M], of the codes less their zero points; with w_zero
};

// int32 values of memory that a plan needs for the parts of K; 0 where K is not split, and `parts`
// below is null then.
int64_t part_values(const Sizes& size, const GemmPlan& plan);

void multiply_codes(const Sizes& size, const Rows& a, const Rows& w, const CodeTerms& terms,
                    const Output& out, const GemmPlan& plan, int32_t* parts, Stream stream);

void multiply_signs(const Sizes& size, const Rows& a, const Rows& w, const SignTerms& terms,
                    const Output& out, const GemmPlan& plan, int32_t* parts, Stream stream);

// In tiles of `shape`, which is not the large one; K is not split.
void multiply_groups(const Sizes& size, const Rows& a, const Rows& w, const GroupTerms& terms,
                     const Output& out, TileShape shape, Stream stream);

// sums[g][m] = sum_{k in g} (q[m][k] - zero_m), groups of `group` of the k codes of a row.
void sum_groups_of_rows(const Rows& q, const PerRow<int32_t>& zero, int64_t rows, int64_t k,
                        int64_t group, int32_t* sums, Stream stream);

// After a product with OutType::kCodes: (Q4) for the rows with faults, scale and zero point of all.
void settle_codes(const CodesOut& codes, int64_t rows, int64_t n, int8_t* q, float* scale,
                  int32_t* zero_point, Stream stream);

}  // namespace qfx::cuda
