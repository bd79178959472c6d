// binary_pack, binary_mm, binary_linear on the CPU.
#include <algorithm>
#include <cstring>

#include "cpu/binary/gemm.h"
#include "cpu/core/parallel.h"
#include "cpu/core/scratch.h"
#include "cpu/gemm/integrity.h"
#include "cpu/gemm/pack.h"
#include "cpu/gemm/product.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/kernels/tables/sums.h"
#include "cpu/ops/arguments.h"
#include "implement.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kStepsPerElement = 8;  // of packing, in parallel.h's unit

int columns_of(const PackedBits& w, int64_t p) {
  return static_cast<int>(std::min<int64_t>(kPanel, w.n - p * kPanel));
}

// Stores the exact sums in out[M][N].
struct SumSink final : TileSink {
  const PackedBits& w;
  int32_t* out;

  SumSink(const PackedBits& w, int32_t* out) : w(w), out(out) {}

  void load_panel(int64_t, Panel*) const override {}

  void tile(const int32_t* raw, int64_t m, int count, int64_t p, const Panel&) const override {
    const int columns = columns_of(w, p);
    const uint32_t k = static_cast<uint32_t>(w.k);
    for (int r = 0; r < count; ++r, raw += kPanel) {
      int32_t* row = out + (m + r) * w.n + p * kPanel;
      for (int n = 0; n < columns; ++n) {
        row[n] = static_cast<int32_t>(static_cast<uint32_t>(raw[n]) + k);
      }
    }
  }
};

// Applies the epilogue (E1), with row_add = K, while the tile is in cache.
struct ScaledSink final : TileSink {
  const PackedBits& w;
  const float* scale;  // [N]
  const FloatOutput& to;
  const float* row_scale;
  int64_t first;
  int32_t add[kMaxTileRows], mul[kMaxTileRows] = {};

  ScaledSink(const PackedBits& w, const float* scale, const FloatOutput& to, const float* row_scale,
             int64_t first)
      : w(w), scale(scale), to(to), row_scale(row_scale), first(first) {
    std::fill(std::begin(add), std::end(add), static_cast<int32_t>(w.k));
  }

  void load_panel(int64_t p, Panel* panel) const override {
    const int64_t n = p * kPanel, columns = columns_of(w, p);
    *panel = {};
    panel->has_bias = to.bias != nullptr;
    std::copy_n(scale + n, columns, panel->scale);
    if (panel->has_bias) std::copy_n(to.bias + n, columns, panel->bias);
  }

  void tile(const int32_t* raw, int64_t m, int count, int64_t p,
            const Panel& panel) const override {
    char* out = to.data + ((first + m) * w.n + p * kPanel) * to.element();
    const EpilogueArgs args = {raw, count,  columns_of(w, p), add,      mul, row_scale + m,
                               1,   &panel, to.activation,    to.dtype, out, w.n};
    kernels_of(current_isa()).sums->epilogue(&args);
  }
};

PackedBits bits_of(const char* op, Tensor* packed, const Tensor& x, int64_t k, int64_t n) {
  PackedBits weight;
  open_whole(op, "binary_pack", packed, [&](const int8_t* data, int64_t bytes, Contents* contents) {
    const std::string fault = open_packed_bits(data, bytes, &weight);
    *contents = {weight.contents, kBitsHeader};
    return fault;
  });
  STD_TORCH_CHECK(weight.k == k, op, ": x has K=", k, " (shape ", shape_of(x),
                  ") but the weight was packed for K=", weight.k);
  STD_TORCH_CHECK(
      weight.n == n, op, ": N=", n,
      " is asked for (n, or the size of scale) but the weight was packed for N=", weight.n);
  return weight;
}

// Runs f(rows, first, row_scale) over the signs of the rows of x, a bounded number at a time.
template <typename F>
void in_chunks(const FloatMatrix& x, const PackedBits& w, const F& f) {
  const BinaryKernels& kernels = binary_kernels_of(current_isa());
  const int64_t step = bit_rows_at_once(kernels, w);
  thread_local Scratch scratch;
  float* row_scale = scratch.get<float>(std::min(step, std::max<int64_t>(x.rows, 1)));
  for (int64_t first = 0; first < x.rows; first += step) {
    const FloatMatrix chunk = {x.row(first), x.dtype, std::min(step, x.rows - first), x.columns};
    f(kernels, signs_of(kernels, w, chunk, row_scale), first, row_scale);
  }
}

// -1 and 0 for the signs of a row of a type that the kernels do not read.
template <typename T>
void as_floats(const void* row, int64_t k, float* out) {
  const T* w = static_cast<const T*>(row);
  for (int64_t i = 0; i < k; ++i) out[i] = w[i] >= 0 ? 0.f : -1.f;
}

void pack_rows(const Tensor& w, int64_t begin, int64_t end, uint8_t* block) {
  const int64_t k = w.size(1), groups = (k + kBitGroup - 1) / kBitGroup;
  const ScalarType type = w.scalar_type();
  const bool other = type == ScalarType::Char || type == ScalarType::Double;
  const Kernels& floats = kernels_of(current_isa());
  thread_local Scratch scratch, of_bits;
  float* row = scratch.get<float>(k);
  uint8_t* bits = of_bits.get<uint8_t>(groups * kBitGroupBytes);
  for (int64_t n = begin; n < end; ++n) {
    const char* from = static_cast<const char*>(w.const_data_ptr()) + n * k * w.element_size();
    if (type == ScalarType::Char) as_floats<int8_t>(from, k, row);
    if (type == ScalarType::Double) as_floats<double>(from, k, row);
    const FloatMatrix x = other ? FloatMatrix{row, Dtype::kFloat32, 1, k}
                                : FloatMatrix{from, dtype_of("binary_pack", type), 1, k};
    binary_kernels_of(current_isa())
        .signs(row_as_floats(floats, x, 0), k, groups * kBitGroupBytes, bits);
    place_column(bits, groups, n - begin, block);
  }
}

Tensor binary_pack(Tensor w) {
  constexpr const char* op = "binary_pack";
  check_dtype(op, "w", w,
              {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half, ScalarType::Double,
               ScalarType::Char});
  STD_TORCH_CHECK(w.dim() == 2, op, ": w has shape ", shape_of(w), ", expected [N, K]");
  const int64_t n = w.size(0), k = w.size(1);
  STD_TORCH_CHECK(k <= kMaxBinaryK, op, ": K=", k, " is above ", kMaxBinaryK,
                  ", where the int32 sum of the signs could overflow");
  STD_TORCH_CHECK(n <= kMaxBinaryN, op, ": N=", n, " is above ", kMaxBinaryN);
  w = made_contiguous(w);
  Tensor packed = empty_packed(packed_bits_size(n, k));
  int8_t* out = static_cast<int8_t*>(packed.mutable_data_ptr());
  std::memset(out, 0, packed.numel());
  uint8_t* blocks = reinterpret_cast<uint8_t*>(out) + kBitsHeader;
  const PackedBits bits = {n, k, blocks};
  const int64_t panels = k == 0 ? 0 : bits.panels();  // of rows without number, perhaps
  parallel(panels, n * k * kStepsPerElement, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      pack_rows(w, p * kPanel, std::min(n, (p + 1) * kPanel),
                blocks + (bits.panel(p) - bits.blocks));
    }
  });
  know_whole(out, finish_packed_bits(n, k, out));
  return packed;
}

Tensor binary_mm(Tensor x, Tensor packed, int64_t n) {
  constexpr const char* op = "binary_mm";
  check_float(op, "x", x);
  const Matrix size = matrix_of(op, "x", x);
  const PackedBits w = bits_of(op, &packed, x, size.columns, n);
  x = made_contiguous(x);
  Tensor sums = empty_on_cpu(with_last(x, n), ScalarType::Int);
  if (sums.numel() == 0) return sums;  // of rows without number, perhaps
  int32_t* out = static_cast<int32_t*>(sums.mutable_data_ptr());
  const FloatMatrix matrix = {x.const_data_ptr(), dtype_of(op, x.scalar_type()), size.rows,
                              size.columns};
  in_chunks(matrix, w, [&](const auto& kernels, const BitRows& rows, int64_t first, const float*) {
    binary_gemm(kernels, rows, w, SumSink(w, out + first * w.n));
  });
  return sums;
}

Tensor binary_linear(Tensor x, Tensor packed, Tensor scale, std::optional<Tensor> bias,
                     Text activation, ScalarType out_dtype) {
  constexpr const char* op = "binary_linear";
  check_float(op, "x", x);
  check_dtype(op, "scale", scale, {ScalarType::Float});
  check_vector(op, "scale", scale, scale.numel());
  const Matrix size = matrix_of(op, "x", x);
  const PackedBits w = bits_of(op, &packed, x, size.columns, scale.numel());
  FloatOutput to = {bias_of(op, bias, w.n), activation_of(op, activation), dtype_of(op, out_dtype),
                    nullptr};
  x = made_contiguous(x);
  scale = made_contiguous(scale);
  Tensor y = empty_on_cpu(with_last(x, w.n), out_dtype);
  if (y.numel() == 0) return y;
  to.data = static_cast<char*>(y.mutable_data_ptr());
  const FloatMatrix matrix = {x.const_data_ptr(), dtype_of(op, x.scalar_type()), size.rows,
                              size.columns};
  in_chunks(matrix, w,
            [&](const auto& kernels, const BitRows& rows, int64_t first, const float* row_scale) {
              binary_gemm(kernels, rows, w, ScaledSink(w, floats(scale), to, row_scale, first));
            });
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(qfx, CPU, m) {
  implement<"binary_pack", &binary_pack>(m);
  implement<"binary_mm", &binary_mm>(m);
  implement<"binary_linear", &binary_linear>(m);
}

}  // namespace
}  // namespace qfx::cpu
