// An instruction of a program: checked and prepared once, run once a step.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "cpu/gemm/tuning.h"
#include "cpu/kernels/tables/kernels.h"
#include "cpu/program/operand.h"

namespace qfx::cpu {

// The weight of a linear, and for how many rows it is streamed.
struct Streamed {
  const void* data;
  int64_t bytes, rows;
};

class Instruction {
 public:
  virtual ~Instruction() = default;
  virtual void run(const Kernels& kernels, char* const* slots) const = 0;
  // Multiply-accumulates, or elements that are read or written once: no less than one run takes.
  virtual double work() const = 0;
  // Appends its weights.
  virtual void streamed(char* const*, std::vector<Streamed>*) const {}
};

using Made = std::unique_ptr<const Instruction>;

// The first word of each, in the order of OPERATIONS in qfx/programs/bytecode.py.
enum class Operation : int64_t {
  kCopy,         // out, x: floats of any element, the same element, or whether a long is not 0
  kUnary,        // which, out, x
  kBinary,       // which, out, a, b
  kMean,         // out [.., 1], x [.., n]
  kSum,          // out [.., 1], x [.., n]
  kEmbedding,    // out [.., d], indices, table [v, d]
  kLinear,       // x and how it is quantized; how many weights, out and what else of each
  kKvWrite,      // keys, values: codes, scales of each; k, v, places
  kKvAttention,  // keys, values; q, out, whether there is a mask, it, scale, length, the same of a
                 // block table, softcap
  kWhere,        // out, condition: floats or bytes, a where it is not 0, b
  kFloatLinear,  // out [.., n], x [.., k], weight [n, k], whether there is a bias, it
  kSoftmax,      // out [.., n], x [.., n]
  kTopK,         // values and indices [.., k], x [.., n]
  kGather,       // out [.., k], x [.., n], indices [.., k]
  kScatter,      // out [.., n], indices [.., k], the value that is written there
  kExperts,      // out, x, experts and weights of slots, how rows are quantized for both products,
                 // what lies between them, the weights of both
  kAttention,  // out [B, H, M, E], q [B, H, M, D], k [B, G, N, D], v [B, G, N, E], whether in int8,
               // scale, whether causal, whether there is a mask, it [B, H, M, N]
  kLayerNorm,  // out [.., n], x [.., n], whether there is a weight, it, the same of a bias, eps
  kCount
};

Made copy_of(Words& words);
Made unary_of(Words& words);
Made binary_of(Words& words);
Made sum_of(Words& words, bool mean);
Made embedding_of(Words& words);
// slots: what is known of constants when the program is made; null where that is known later. how:
// where a program keeps how its weights are streamed, if that was set.
Made linear_of(Words& words, char* const* slots, const std::optional<Streaming>& how);
Made kv_write_of(Words& words);
Made kv_attention_of(Words& words);
Made where_of(Words& words);
Made float_linear_of(Words& words);
Made softmax_of(Words& words);
Made top_k_of(Words& words);
Made gather_of(Words& words);
Made scatter_of(Words& words);
Made experts_of(Words& words, char* const* slots);
Made attention_of(Words& words);
Made layer_norm_of(Words& words);

}  // namespace qfx::cpu
