// Linears of experts: rows that each meet the weight of one of several experts. (X1) (X2)
#pragma once

#include <span>
#include <vector>

#include "cpu/gemm/gate.h"
#include "cpu/gemm/linear.h"

namespace qfx::cpu {

// Rows [begin, end) of all, and the linear of the expert that they are for, whose output 0 is that
// of row 0.
struct ExpertRows {
  int64_t begin, end;
  Linear linear;
};

// Rows are quantized as they come, and meet the weight of their expert. (X1)
void linear_of_experts(const Kernels& kernels, const QuantizedFloats& from,
                       std::span<const ExpertRows> experts);

// Which of `count` experts slots go to.
struct UsedExperts {
  std::vector<int64_t> number;  // of each place, in their order
  std::vector<int32_t> place;   // of each slot; -1 where its number is none of an expert
};

UsedExperts used_experts(std::span<const int64_t> expert, int64_t count);

// The weights of an expert, and their biases [n] or null.
struct ExpertWeights {
  Weight up, down;
  const float *up_bias, *down_bias;
};

// Which experts the tokens x [T, K] go to, and what becomes of them there.
struct RoutedTokens {
  QuantizedFloats x;
  int64_t slots;
  const int32_t* expert;  // [T, slots]: a place in the weights, or -1 for none
  const float* weight;    // [T, slots]
  Gate gate;
  CodeSpec spec;  // of what the gate gives, as QuantizedFloats has them
  int64_t group;
  Transform transform;
  int64_t n;  // of the second products
};

// out[t] = the sum over slots s, in their order, of weight[t][s] down(gate(up(x[t]))), of the
// expert of the slot. (X2)
void experts(const Kernels& kernels, const RoutedTokens& tokens,
             std::span<const ExpertWeights> weights, Dtype dtype, char* out);

}  // namespace qfx::cpu
