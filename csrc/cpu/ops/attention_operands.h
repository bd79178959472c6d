// Reading the operands of attention: which heads of queries meet which keys, and where they lie.
#pragma once

#include <optional>

#include "cpu/attention/attention.h"
#include "cpu/ops/arguments.h"

namespace qfx::cpu {

// What an operator is called with. Batch axes broadcast; k and v may also have fewer heads (the
// last batch axis) than q, each of which then serves as many consecutive ones of q. Rows of q, k
// and v must be contiguous.
struct AttentionOperands {
  const Tensor &q, &k, &v;
  const std::optional<Tensor>& mask;  // broadcasts to the scores
  double scale;
  bool causal;
};

using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

struct AttentionSizes {
  Sizes q, k, v;
};

// The shape [*B, M, E] of the result. Errors: shapes that do not fit, too large sizes.
std::vector<int64_t> attention_shape(const char* op, const AttentionSizes& sizes,
                                     const std::optional<Tensor>& mask);

// Everything but `dtype` checked; the outputs lie in y, of that shape. Heads of keys are those that
// differ: an axis along which neither k nor v moves, being expanded or of size 1, is one of queries
// that share keys.
Attention attention_of(const char* op, const AttentionOperands& operands, const Tensor& y);

}  // namespace qfx::cpu
