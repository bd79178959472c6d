// binary_pack, binary_mm, binary_linear on CUDA.
#include "cuda/gemm/bits_layout.h"
#include "cuda/ops/product.h"
#include "cuda/rows/signs.h"
#include "implement.h"

namespace qfx::cuda {
namespace {

constexpr int64_t kMaxBinaryK = INT32_MAX;  // the sum of K signs is an int32

Element element_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return Element::kFloat32;
    case ScalarType::BFloat16:
      return Element::kBFloat16;
    case ScalarType::Half:
      return Element::kFloat16;
    case ScalarType::Double:
      return Element::kFloat64;
    default:
      return Element::kInt8;
  }
}

Tensor binary_pack(Tensor w) {
  constexpr const char* op = "binary_pack";
  const OnDevice device(op, w);
  check_dtype(op, "w", w,
              {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half, ScalarType::Double,
               ScalarType::Char});
  STD_TORCH_CHECK(w.dim() == 2, op, ": w has shape ", shape_of(w), ", expected [N, K]");
  const BitsLayout layout = {w.size(0), w.size(1)};
  STD_TORCH_CHECK(layout.k <= kMaxBinaryK, op, ": K=", layout.k, " is above ", kMaxBinaryK,
                  ", where the int32 sum of the signs could overflow");
  w = made_contiguous(w);
  Tensor packed = zeros_beside(w, {layout.bytes()}, ScalarType::Char);
  int8_t* data = data_of<int8_t>(packed);
  const Signs out = {reinterpret_cast<uint32_t*>(data + layout.bits_at()), layout.words(),
                     reinterpret_cast<int32_t*>(data), nullptr};
  signs_of_rows(w.const_data_ptr(), element_of(w.scalar_type()), layout.n, layout.k, out,
                device.stream());
  return packed;
}

void check_packed(const char* op, const Tensor& packed, const Tensor& x, int64_t n) {
  const int64_t k = matrix_of(op, "x", x).columns;
  check_dtype(op, "the packed weight", packed, {ScalarType::Char});
  STD_TORCH_CHECK(packed.dim() == 1, op, ": the packed weight has shape ", shape_of(packed),
                  ", binary_pack returns one dimension");
  const BitsLayout layout = {n, k};
  STD_TORCH_CHECK(packed.numel() == layout.bytes(), op, ": the packed weight has ", packed.numel(),
                  " bytes, but one for N=", n, " (n, or the size of scale) and K=", k,
                  " of x (shape ", shape_of(x), ") has ", layout.bytes());
}

// The product of the signs of x and of a checked packed weight; `out` wants no scales of rows.
void run_signs(const char* op, const OnDevice& device, const Tensor& given, const Tensor& packed,
               int64_t n, Output out) {
  const Matrix size = matrix_of(op, "x", given);
  const BitsLayout layout = {n, size.columns};
  if (size.rows * n == 0) return;
  const Tensor x = made_contiguous(given);
  Tensor bits = empty_beside(x, {size.rows, layout.words()}, ScalarType::Int);
  Tensor set = empty_beside(x, {size.rows}, ScalarType::Int);
  Tensor scale = empty_beside(x, {size.rows}, ScalarType::Float);
  signs_of_rows(
      x.const_data_ptr(), element_of(x.scalar_type()), size.rows, size.columns,
      {data_of<uint32_t>(bits), layout.words(), data_of<int32_t>(set), data_of<float>(scale)},
      device.stream());
  out.row_scale = {floats(scale), 1};
  const int8_t* w = static_cast<const int8_t*>(packed.const_data_ptr());
  const Rows rows = {static_cast<const int8_t*>(bits.const_data_ptr()), layout.pitch(), 0};
  const SignTerms terms = {static_cast<uint32_t>(size.columns), ints(set),
                           reinterpret_cast<const int32_t*>(w)};
  run_product(device, x, {1, size.rows, n, layout.pitch()}, rows,
              {w + layout.bits_at(), layout.pitch(), 0}, terms, out);
}

Tensor binary_mm(Tensor x, Tensor packed, int64_t n) {
  constexpr const char* op = "binary_mm";
  const OnDevice device(op, x, packed);
  check_float(op, "x", x);
  check_packed(op, packed, x, n);
  Tensor sums = empty_beside(x, with_last(x, n), ScalarType::Int);
  Output out = {};
  out.type = OutType::kIntegers;
  out.data = sums.mutable_data_ptr();
  run_signs(op, device, x, made_aligned(packed), n, out);
  return sums;
}

Tensor binary_linear(Tensor x, Tensor packed, Tensor scale, std::optional<Tensor> bias,
                     Text activation, ScalarType out_dtype) {
  constexpr const char* op = "binary_linear";
  const OnDevice device(op, x, packed, scale, bias);
  check_float(op, "x", x);
  const int64_t n = scale.numel();
  check_packed(op, packed, x, n);
  check_col_scales(op, "scale", scale, n);
  check_bias(op, bias, n);
  Output out = {};
  out.activation = activation_of(op, activation);
  out.dtype = dtype_of(op, out_dtype);
  scale = made_contiguous(scale);
  bias = made_contiguous(bias);
  out.col_scale = floats(scale);
  out.bias = bias_of(op, bias);
  Tensor y = empty_beside(x, with_last(x, n), out_dtype);
  out.data = y.mutable_data_ptr();
  run_signs(op, device, x, made_aligned(packed), n, out);
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(QFX_LIBRARY, QFX_KEY, m) {
  implement<"binary_pack", &binary_pack>(m);
  implement<"binary_mm", &binary_mm>(m);
  implement<"binary_linear", &binary_linear>(m);
}

}  // namespace
}  // namespace qfx::cuda
