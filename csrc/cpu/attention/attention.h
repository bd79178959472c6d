// softmax(q k^T scale + mask) v, in int8: (A1) to (A6), and in float for a few queries: (A7) to
// (A9).
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/attention/mask.h"
#include "cpu/gemm/quantize.h"

namespace qfx::cpu {

struct KeyHead {
  const void *k, *v;
};

struct QueryHead {
  const void* q;
  const char* mask;
  char* out;  // [M, E]
};

// Of many heads: q [M, D], k [N, D], v [N, E] and the mask [M, N] have the sizes and strides of
// these here, rows contiguous, and lie where the lists say. As many heads of queries as another
// share each head of keys: `group()` consecutive ones.
struct Attention {
  FloatMatrix q, k, v;
  Mask mask;
  float scale;
  bool causal;  // row m sees the keys 0..m
  Dtype dtype;  // of the outputs
  std::vector<KeyHead> keys;
  std::vector<QueryHead> queries;

  int64_t heads() const { return static_cast<int64_t>(keys.size()); }
  int64_t group() const {
    return keys.empty() ? 0 : static_cast<int64_t>(queries.size() / keys.size());
  }
  // Keys that row m sees if nothing masks them.
  int64_t keys_of_row(int64_t m) const { return causal && m < k.rows ? m + 1 : k.rows; }
};

// On several threads.
void attend(const Kernels& kernels, const Attention& attention);

// One of the heads of queries, in float.
void attend_in_float(const Kernels& kernels, const Attention& attention, int64_t query);

// All heads in float, for many queries: keys and values are laid out for tiles of six rows. (A10)
// On several threads. q, k, v and the outputs are float32; rows of outputs are so many apart.
void attend_in_float_tiles(const Kernels& kernels, const Attention& attention, int64_t out_stride);

// The matrix of these sizes that lies there.
inline FloatMatrix at(const FloatMatrix& sizes, const void* data) {
  FloatMatrix matrix = sizes;
  matrix.data = data;
  return matrix;
}

inline Mask at(const Mask& strides, const char* data) {
  Mask mask = strides;
  mask.data = data;
  return mask;
}

}  // namespace qfx::cpu
