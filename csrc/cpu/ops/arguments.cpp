#include "cpu/ops/arguments.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#include "cpu/core/pages.h"
#include "cpu/core/scratch.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/kernels/tables/rows.h"

namespace qfx::cpu {

void check_cpu(const char* op, const char* what, const Tensor& t) {
  STD_TORCH_CHECK(t.is_cpu(), op, ": ", what,
                  " is not on the CPU while other operands are; move all "
                  "operands to one device");
}

FloatMatrix float_matrix_of(const char* op, const Tensor& x, const Matrix& size,
                            const std::optional<Tensor>& factor, int64_t rotation) {
  const Dtype dtype = dtype_of(op, x.scalar_type());
  const Transform transform = transform_of(factor, rotation);
  return {x.const_data_ptr(), dtype, size.rows, size.columns, size.columns, transform};
}

namespace {

void check_whole(const char* op, const std::string& fault) {
  STD_TORCH_CHECK(fault.empty(), op, ": not a packed weight of this build: ", fault);
}

}  // namespace

void open_whole(const char* op, const char* maker, Tensor* packed, const OpenPacked& open) {
  constexpr int64_t kHeader = sizeof(PackedHeader);  // the longest
  check_dtype(op, "the packed weight", *packed, {ScalarType::Char});
  STD_TORCH_CHECK(packed->dim() == 1, op, ": the packed weight has shape ", shape_of(*packed), ", ",
                  maker, " returns one dimension");
  const int64_t bytes = packed->numel();
  const int8_t* data = static_cast<const int8_t*>(packed->const_data_ptr());
  std::string fault;
  Contents contents = {};
  if (!packed->is_contiguous()) {
    int8_t header[kHeader] = {};
    for (int64_t i = 0; i < std::min(bytes, kHeader); ++i) header[i] = data[i * packed->stride(0)];
    fault = open(header, bytes, &contents);
    if (fault.empty()) {
      *packed = made_contiguous(*packed);
      data = static_cast<const int8_t*>(packed->const_data_ptr());
    }
  }
  if (fault.empty()) fault = open(data, bytes, &contents);
  if (fault.empty()) fault = fault_at_first_use(data, bytes, contents);
  check_whole(op, fault);
}

namespace {

std::string kind_of(int64_t bits, int64_t group, int64_t scale_group, bool shift) {
  std::string kind = std::to_string(bits) + " bits in ";
  kind += group == 0 ? "one group" : "groups of " + std::to_string(group);
  kind += scale_group == 0 ? " with one scale a row" : " with a scale each";
  return kind + (shift ? " and zero points or minimums" : "");
}

void check_layout(const char* op, const Weight& w, const WeightLayoutArgument& known) {
  const PackedWeight& shape = w.shape();
  STD_TORCH_CHECK(shape.n == known.n, op, ": N=", known.n,
                  " is asked for but the weight was packed for N=", shape.n);
  const int64_t group = w.is_lowbit() || w.cut ? shape.group : 0;
  const int64_t scale_group = shape.scale_by_group ? shape.group : 0;
  const bool same_scales = scale_group == known.scale_group || shape.groups() <= 1;
  const bool same = w.bits == known.bits && group == known.group && same_scales &&
                    w.is_shifted() == (known.shift != 0);
  STD_TORCH_CHECK(same, op, ": the layout says ",
                  kind_of(known.bits, known.group, known.scale_group, known.shift != 0),
                  ", but the weight was packed with ",
                  kind_of(w.bits, group, scale_group, w.is_shifted()));
}

}  // namespace

Weight weight_of(const char* op, Tensor* packed, const Tensor& x, int64_t k,
                 const std::vector<int64_t>& layout) {
  const WeightLayoutArgument known = layout_argument_of(op, layout);
  Weight w;
  open_whole(op, "pack_weight", packed, [&](const int8_t* data, int64_t bytes, Contents* contents) {
    const std::string fault = open_weight(data, bytes, &w);
    *contents = contents_of(w);
    return fault;
  });
  STD_TORCH_CHECK(w.shape().k == k, op, ": x has K=", k, " (shape ", shape_of(x),
                  ") but the weight was packed for K=", w.shape().k);
  check_layout(op, w, known);
  return w;
}

Weight weight_at(const char* op, const int8_t* data, int64_t bytes, int64_t k,
                 const WeightLayoutArgument& layout) {
  Weight w;
  std::string fault = open_weight(data, bytes, &w);
  if (fault.empty()) fault = fault_at_first_use(data, bytes, contents_of(w));
  check_whole(op, fault);
  STD_TORCH_CHECK(w.shape().k == k, op, ": x has K=", k,
                  " but the weight was packed for K=", w.shape().k);
  check_layout(op, w, layout);
  return w;
}

Weight whole_weight_of(const char* op, Tensor* packed, const Tensor& x, int64_t k, int64_t n) {
  return weight_of(op, packed, x, k, {n, 8, 0, 0, 0});
}

void check_zero_point(const char* op, const Tensor& zero_point, int64_t rows) {
  check_dtype(op, "zero_point", zero_point, {ScalarType::Int});
  check_per_row(op, "zero_point", zero_point, rows);
}

Tensor empty_on_cpu(const std::vector<int64_t>& shape, ScalarType dtype) {
  // The C library maps larger memory again at each call: in small pages that costs more than to
  // write it, for logits as much as their product.
  constexpr int64_t kAlwaysMapped = 32 << 20;
  Tensor made = allocated(
      shape, dtype, [&] { return torch::stable::empty({shape.data(), shape.size()}, dtype); });
  const int64_t bytes = made.numel() * made.element_size();
  if (bytes >= kAlwaysMapped) prefer_huge_pages(made.mutable_data_ptr(), bytes);
  return made;
}

Tensor empty_packed(int64_t size) {
  constexpr int64_t kLine = 64;
  return allocated({size}, ScalarType::Char, [&] {
    void* data = std::aligned_alloc(kLine, round_up(size, kLine));
    if (data == nullptr) throw std::bad_alloc();
    prefer_huge_pages(data, size);  // a hint: a refusal changes nothing
    const auto give_back = [](void* memory) {
      forget_whole(memory);
      std::free(memory);
    };
    const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
    return torch::stable::from_blob(data, {size}, {1}, cpu, ScalarType::Char, give_back);
  });
}

void check_bias(const char* op, const std::optional<Tensor>& bias, int64_t n) {
  if (!bias.has_value()) return;
  check_float(op, "bias", *bias);
  check_vector(op, "bias", *bias, n);
}

namespace {

// n floats as float32, in memory of the calling thread until the next call.
const float* copied_bias(const void* data, Dtype dtype, int64_t n) {
  thread_local Scratch scratch;
  float* values = scratch.get<float>(std::max<int64_t>(n, 1));
  if (dtype == Dtype::kFloat32) {
    std::copy_n(static_cast<const float*>(data), n, values);
  } else {
    kernels_of(current_isa()).row->widen(data, dtype, n, values);
  }
  return values;
}

}  // namespace

const float* bias_of(const char* op, const std::optional<Tensor>& bias, int64_t n) {
  check_bias(op, bias, n);
  if (!bias.has_value()) return nullptr;
  const Dtype dtype = dtype_of(op, bias->scalar_type());
  if (bias->is_contiguous()) return bias_at(bias->const_data_ptr(), dtype, n);
  const Tensor flat = made_contiguous(*bias);
  return copied_bias(flat.const_data_ptr(), dtype, n);
}

const float* bias_at(const void* data, Dtype dtype, int64_t n) {
  return dtype == Dtype::kFloat32 ? static_cast<const float*>(data) : copied_bias(data, dtype, n);
}

}  // namespace qfx::cpu
