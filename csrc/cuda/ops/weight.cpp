// pack_weight, unpack_weight, weight_scale on CUDA.
#include <tuple>

#include "cuda/gemm/pack.h"
#include "cuda/ops/float_linear.h"
#include "cuda/ops/lowbit_linear.h"
#include "cuda/ops/product.h"
#include "implement.h"

namespace qfx::cuda {
namespace {

constexpr int64_t kWordBytes = 4;

Tensor pack_weight(Tensor codes, Tensor scale, std::optional<Tensor> zero_point,
                   std::optional<Tensor> minimum, int64_t bits, int64_t group) {
  constexpr const char* op = "pack_weight";
  const OnDevice device(op, codes, scale, zero_point, minimum);
  if (bits != 8) return low_bit_pack(op, codes, scale, zero_point, minimum, bits, group);
  check_codes(op, codes, group, kCudaGroupMultiple);
  STD_TORCH_CHECK(!minimum.has_value(), op, ": minimum is given with bits=8, which has none");
  const int64_t n = codes.size(0), k = codes.size(1);
  WeightLayout layout = WeightLayout::of(n, k, group, 0, zero_point.has_value());
  check_dtype(op, "scale", scale, {ScalarType::Float});
  layout.group_scales = check_of_rows_or_groups(op, "scale", scale, codes, group);
  if (zero_point.has_value()) {
    check_dtype(op, "zero_point", *zero_point, {ScalarType::Int});
    STD_TORCH_CHECK(shape_of(*zero_point) == shape_of(scale), op, ": zero_point has shape ",
                    shape_of(*zero_point), ", expected ", shape_of(scale), " as scale has");
  }
  check_sums(op, layout);
  scale = made_contiguous(scale);
  zero_point = made_contiguous(zero_point);
  Tensor packed = empty_beside(codes, {layout.bytes()}, ScalarType::Char);
  int8_t* const to = data_of<int8_t>(packed);
  // A transposed weight, as backward has it, is turned first: by tiles, not byte by byte.
  const bool turn = codes.stride(1) != 1 && codes.stride(0) == 1;
  const int8_t* given = static_cast<const int8_t*>(codes.const_data_ptr());
  const OwnedRows rows = turn ? rows_of_matrices(codes, device.stream())
                              : OwnedRows{codes, {given, codes.stride(0), 0}};
  pack_weight(rows.rows.data, rows.rows.pitch, turn ? 1 : codes.stride(1), layout, to,
              device.stream());
  copy_words(floats(scale), scale.numel(), to + layout.scale_at(), device.stream());
  if (zero_point.has_value()) {
    copy_words(ints(*zero_point), scale.numel(), to + layout.zero_point_at(), device.stream());
  }
  return packed;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> unpack_weight(Tensor weight, std::vector<int64_t> given,
                                                         int64_t k) {
  constexpr const char* op = "unpack_weight";
  const OnDevice device(op, weight);
  const WeightLayoutArgument layout = layout_argument_of(op, given);
  if (is_low_bit(layout)) {
    auto [codes, scale, zero_point, minimum] = low_bit_unpack(op, weight, layout, k);
    return {codes, scale, zero_point, minimum};
  }
  const WeightLayout bytes = weight_layout_of(op, weight, layout, k);
  weight = made_aligned(weight);
  const PackedWeight packed = packed_of(bytes, weight);
  const std::vector<int64_t> each = {layout.n, bytes.scales()};
  Tensor codes = empty_beside(weight, {layout.n, k}, ScalarType::Char);
  Tensor scale = empty_beside(weight, each, ScalarType::Float);
  Tensor zero_point = zeros_beside(weight, each, ScalarType::Int);
  const Tensor minimum = zeros_beside(weight, each, ScalarType::Float);
  unpack_weight(packed, data_of<int8_t>(codes), device.stream());
  copy_words(packed.scale, scale.numel(), data_of<float>(scale), device.stream());
  if (layout.shift) {
    copy_words(packed.zero_point, scale.numel(), data_of<int32_t>(zero_point), device.stream());
  }
  return {codes, scale, zero_point, minimum};
}

// The scales stand last, wherever K has put them.
Tensor weight_scale(Tensor weight, int64_t n) {
  constexpr const char* op = "weight_scale";
  const OnDevice device(op, weight);
  check_dtype(op, "the packed weight", weight, {ScalarType::Char});
  const int64_t at = weight.numel() - kWordBytes * n;
  const int64_t codes = at - WeightLayout{n, 0}.weights_at();
  STD_TORCH_CHECK(
      weight.dim() == 1 && n >= 0 && codes >= 0 && codes % std::max(kPitch * n, int64_t{1}) == 0,
      op, ": the packed weight has shape ", shape_of(weight), ", which none with N=", n,
      ", one scale for each row and no zero points has");
  weight = made_aligned(weight);
  Tensor scale = empty_beside(weight, {n}, ScalarType::Float);
  copy_words(static_cast<const int8_t*>(weight.const_data_ptr()) + at, n, data_of<float>(scale),
             device.stream());
  return scale;
}

STABLE_TORCH_LIBRARY_IMPL(QFX_LIBRARY, QFX_KEY, m) {
  implement<"pack_weight", &pack_weight>(m);
  implement<"unpack_weight", &unpack_weight>(m);
  implement<"weight_scale", &weight_scale>(m);
}

}  // namespace
}  // namespace qfx::cuda
