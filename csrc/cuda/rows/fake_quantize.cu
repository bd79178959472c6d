// fake_quantize: the values that codes stand for, without the codes. (Q5)
#include "cuda/rows/codes.cuh"

namespace qfx::cuda {
namespace {

struct FakeQuantize {
  CodeSpec spec;
  TensorCode shared;
  Dtype dtype;
  void* y;

  template <typename Row>
  __device__ void operator()(Row& row) const {
    const RowCode code = code_of_row(row, spec, shared);
    with_type(dtype, [&](auto type) { write(row, code, static_cast<decltype(type)*>(y)); });
  }

  template <typename Row, typename T>
  __device__ __forceinline__ void write(Row& row, const RowCode& code, T* values) const {
    T* to = values + row.m * row.x.columns;
    const bool aligned = row.x.columns * sizeof(T) % 16 == 0;
    row.each([&](int64_t k, int count, const float (&v)[kPiece]) {
      float back[kPiece];
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        back[i] = static_cast<float>(code_for(code, v[i]) - code.zero_point) * code.scale;
      }
      store_piece(to + k, count, aligned, back);
    });
  }
};

}  // namespace

void fake_quantize(const FloatRows& x, const CodeSpec& spec, const TensorCode& shared, Dtype dtype,
                   void* y, Stream stream) {
  if (spec.per_tensor) choose_tensor_code(x, spec, shared, stream);
  for_each_row(x, FakeQuantize{spec, shared, dtype, y}, stream);
}

}  // namespace qfx::cuda
