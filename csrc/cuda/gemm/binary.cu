// multiply_signs of gemm.h.
#include "cuda/gemm/gemm.cuh"

namespace qfx::cuda {

void multiply_signs(const Sizes& size, const Rows& a, const Rows& w, const SignTerms& terms,
                    const Output& out, const GemmPlan& plan, int32_t* parts, Stream stream) {
  run_plan(Product{size, a, w, {}, 0, 0, parts}, plan, SignSums{terms}, out, stream);
}

}  // namespace qfx::cuda
