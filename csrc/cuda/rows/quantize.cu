// quantize, quantize_static, fake_quantize, and the range of a matrix. (Q1) to (Q6)
#include "cuda/rows/codes.cuh"

namespace qfx::cuda {
namespace {

struct Quantize {
  CodeSpec spec;
  Codes out;

  template <typename Row>
  __device__ void operator()(Row& row) const {
    const RowCode code = code_of_row(row, spec, out);
    write_codes(row, out.q, [&](int64_t, const float (&v)[kPiece], int32_t (&codes)[kPiece]) {
#pragma unroll
      for (int i = 0; i < kPiece; ++i) codes[i] = code_for(code, v[i]);
    });
  }
};

struct QuantizeStatic {
  CodeSpec spec;
  GivenCode given;
  Codes out;

  template <typename Row>
  __device__ void operator()(Row& row) const {
    const int32_t magnitude = magnitude_of(row.extremes());
    const bool faulty = magnitude >= kInfinity;
    const float scale = faulty ? __int_as_float(magnitude) : given.scale[row.m * given.scale_step];
    const int32_t zero = given.zero_point ? given.zero_point[row.m * given.zero_step] : 0;
    const RowCode code = code_with(spec, scale, zero);
    write_code(row, out, code);
    write_codes(row, out.q, [&](int64_t, const float (&v)[kPiece], int32_t (&codes)[kPiece]) {
#pragma unroll
      for (int i = 0; i < kPiece; ++i) codes[i] = code_for(code, v[i]);
    });
  }
};

struct FindExtremes {  // of the rows without a NaN or an infinity
  int32_t* most;
  uint32_t* least;

  template <typename Row>
  __device__ void operator()(Row& row) const {
    const Extremes found = row.extremes();
    if (static_cast<int>(threadIdx.x) % (Row::kStep / kPiece) != 0) return;
    if (magnitude_of(found) >= kInfinity) return;
    atomicMax(most, found.most);
    atomicMax(least, found.least);
  }
};

__global__ void clear_extremes(int32_t* most, uint32_t* least) {
  *most = 0;
  *least = 0;
}

// In place: the extremes lie where scale and zero point go.
__global__ void choose_from_extremes(CodeSpec spec, float* scale, int32_t* zero_point) {
  const Extremes found = {__float_as_int(*scale), static_cast<uint32_t>(*zero_point)};
  const RowCode code = code_of(found, spec);
  *scale = code.scale;
  *zero_point = code.zero_point;
}

}  // namespace

void choose_tensor_code(const FloatRows& x, const CodeSpec& spec, const TensorCode& to,
                        Stream stream) {
  int32_t* most = reinterpret_cast<int32_t*>(to.scale);
  uint32_t* least = reinterpret_cast<uint32_t*>(to.zero_point);
  launch(clear_extremes, 1, 1, 0, stream, most, least);
  for_each_row(x, FindExtremes{most, least}, stream);
  launch(choose_from_extremes, 1, 1, 0, stream, spec, to.scale, to.zero_point);
}

void quantize(const FloatRows& x, const CodeSpec& spec, const Codes& out, Stream stream) {
  if (spec.per_tensor) choose_tensor_code(x, spec, out.shared, stream);
  for_each_row(x, Quantize{spec, out}, stream);
}

void quantize_static(const FloatRows& x, const CodeSpec& spec, const GivenCode& given,
                     const Codes& out, Stream stream) {
  for_each_row(x, QuantizeStatic{spec, given, out}, stream);
}

}  // namespace qfx::cuda
