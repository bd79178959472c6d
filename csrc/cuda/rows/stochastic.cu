// quantize_stochastic: random bits of a counter, Philox-4x32-7. (Q7)
#include "cuda/rows/codes.cuh"

namespace qfx::cuda {
namespace {

struct Words {
  uint32_t w0, w1, w2, w3;
};

__device__ __forceinline__ Words philox(uint64_t seed, uint64_t counter) {
  constexpr uint32_t kMultiply0 = 0xD2511F53, kMultiply1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  constexpr int kRounds = 7;
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  Words c = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0};
#pragma unroll
  for (int round = 0; round < kRounds; ++round, key0 += kWeyl0, key1 += kWeyl1) {
    const uint32_t high0 = __umulhi(kMultiply0, c.w0), high1 = __umulhi(kMultiply1, c.w2);
    c = {high1 ^ c.w1 ^ key0, kMultiply1 * c.w2, high0 ^ c.w3 ^ key1, kMultiply0 * c.w0};
  }
  return c;
}

// The 16-bit halves of the elements i, i + 1, ... that share i / 4.
struct Quad {
  uint32_t low, high;

  __device__ __forceinline__ Quad(uint64_t seed, uint64_t i) {
    const Words words = philox(seed, i / 64 * 8 + i % 32 / 4);
    const bool second = i % 64 >= 32;
    low = second ? words.w2 : words.w0;
    high = second ? words.w3 : words.w1;
  }
  __device__ __forceinline__ uint32_t half(uint64_t i) const {
    const uint32_t word = i % 4 < 2 ? low : high;
    return i % 2 == 0 ? word & 0xffff : word >> 16;
  }
};

struct QuantizeStochastic {
  CodeSpec spec;
  const int64_t* seed;
  Codes out;

  template <typename Row>
  __device__ void operator()(Row& row) const {
    const RowCode code = code_of_row(row, spec, out);
    const uint64_t key = static_cast<uint64_t>(*seed), begin = row.m * row.x.columns;
    write_codes(row, out.q, [&](int64_t k, const float (&v)[kPiece], int32_t (&codes)[kPiece]) {
      uint64_t i = begin + k;
      Quad quad(key, i);
#pragma unroll
      for (int e = 0; e < kPiece; ++e, ++i) {
        if (e > 0 && i % 4 == 0) quad = Quad(key, i);
        const float u = static_cast<float>(quad.half(i)) * 0x1p-16f + 0x1p-17f;
        const float sum = v[e] * code.inverse + u;
        codes[e] = code.finite ? clamp_code(code, __float2int_rd(sum)) : 0;
      }
    });
  }
};

}  // namespace

void quantize_stochastic(const FloatRows& x, const CodeSpec& spec, const int64_t* seed,
                         const Codes& out, Stream stream) {
  if (spec.per_tensor) choose_tensor_code(x, spec, out.shared, stream);
  for_each_row(x, QuantizeStochastic{spec, seed, out}, stream);
}

}  // namespace qfx::cuda
