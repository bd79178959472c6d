// pack_weight, unpack_weight on CUDA.
#include "cuda/gemm/pack.h"
#include "cuda/ops/product.h"
#include "implement.h"

namespace qfx::cuda {
namespace {

Tensor pack_weight(Tensor w, int64_t group) {
  constexpr const char* op = "pack_weight";
  const OnDevice device(op, w);
  check_weight(op, w, group, kCudaGroupMultiple);
  const WeightLayout layout = WeightLayout::of(w.size(0), w.size(1), group);
  Tensor packed = empty_beside(w, {layout.bytes()}, ScalarType::Char);
  // A transposed weight, as backward has it, is turned first: by tiles, not byte by byte.
  const bool turn = w.stride(1) != 1 && w.stride(0) == 1;
  const int8_t* given = static_cast<const int8_t*>(w.const_data_ptr());
  const HeldRows rows =
      turn ? rows_of_matrices(w, device.stream()) : HeldRows{w, {given, w.stride(0), 0}};
  pack_weight(rows.rows.data, rows.rows.pitch, turn ? 1 : w.stride(1), layout,
              data_of<int8_t>(packed), device.stream());
  return packed;
}

Tensor unpack_weight(Tensor packed, int64_t n, int64_t k) {
  constexpr const char* op = "unpack_weight";
  const OnDevice device(op, packed);
  const WeightLayout layout = layout_of(op, packed, packed, k, n);
  packed = made_aligned(packed);
  const PackedWeight weight = packed_of(layout, packed);
  Tensor w = empty_beside(packed, {n, k}, ScalarType::Char);
  unpack_weight(weight, data_of<int8_t>(w), device.stream());
  return w;
}

STABLE_TORCH_LIBRARY_IMPL(QFX_LIBRARY, QFX_KEY, m) {
  implement<"pack_weight", &pack_weight>(m);
  implement<"unpack_weight", &unpack_weight>(m);
}

}  // namespace
}  // namespace qfx::cuda
