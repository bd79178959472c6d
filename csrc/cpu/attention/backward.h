// The gradients of int8 attention, in int8: (A11) to (A14).
#pragma once

#include "cpu/attention/attention.h"

namespace qfx::cpu {

// Where the gradients of a head of keys go: [N, D] and [N, E], in the dtypes of keys and values.
struct KeyGradients {
  char *k, *v;
};

struct AttentionGradient {
  Attention forward;               // whose outputs are the gradients of the queries, [M, D]
  FloatMatrix g;                   // of the gradient of an output, [M, E]: sizes and strides
  std::vector<const void*> heads;  // where that of each head of queries lies
  std::vector<KeyGradients> keys;  // one for each head of keys
};

// On several threads, one head of keys or, if these are few, of queries on each.
void attend_backward(const Kernels& kernels, const AttentionGradient& gradient);

}  // namespace qfx::cpu
