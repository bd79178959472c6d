// What lies between the two products of an expert. (X2)
#pragma once

#include "cpu/gemm/gemm.h"

namespace qfx::cpu {

// h [I] of g [I] and u [I], which are the halves of a row, or every other element of it; or of g
// alone.
struct Gate {
  enum class Order { kNone, kHalves, kInterleaved };
  Activation activation;
  Order order;
  float limit;  // of |u|, and of g from above; infinity where there is none
  float shift;  // added to u

  int64_t inputs(int64_t size) const { return order == Order::kNone ? size : 2 * size; }
};

// Rows of h, made of rows of g and u before the rows of codes that are made of h.
struct GatedRows final : RowSource {
  const Kernels& kernels;
  const RowSource& codes;
  const Gate gate;
  const float* from;  // [count][inputs]
  float* to;          // [count][size]
  const int64_t size;

  GatedRows(const Kernels& kernels, const RowSource& codes, const Gate& gate, const float* from,
            float* to, int64_t size)
      : RowSource(codes.rows),
        kernels(kernels),
        codes(codes),
        gate(gate),
        from(from),
        to(to),
        size(size) {}

  void fill(int64_t begin, int64_t end) const override;
  int64_t work() const override;
};

// act(x[i]) of n floats, rounded. Reads up to 31 beyond the last.
void activate_row(const Kernels& kernels, const float* x, int64_t n, Activation activation,
                  Dtype dtype, void* out);

}  // namespace qfx::cpu
