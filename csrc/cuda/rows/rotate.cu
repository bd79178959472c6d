// rotate: the transform by itself. (R1)
#include "cuda/rows/skeleton.cuh"

namespace qfx::cuda {
namespace {

struct Store {
  void* y;

  template <typename Row>
  __device__ void operator()(Row& row) const {
    using T = typename Row::Element;
    T* to = static_cast<T*>(y) + row.m * row.x.columns;
    const bool aligned = row.x.columns * sizeof(T) % 16 == 0;
    row.each([&](int64_t k, int count, const float (&v)[kPiece]) {
      store_piece(to + k, count, aligned, v);
    });
  }
};

}  // namespace

void rotate(const FloatRows& x, bool back, void* y, Stream stream) {
  if (back) return for_each_row<true>(x, Store{y}, stream);
  return for_each_row<false>(x, Store{y}, stream);
}

}  // namespace qfx::cuda
