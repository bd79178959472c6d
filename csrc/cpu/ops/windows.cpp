#include "cpu/ops/windows.h"

#include <array>

namespace qfx::cpu {
namespace {

constexpr size_t kMostAxes = 3;

void check_each(const char* op, const char* what, const std::vector<int64_t>& values, size_t count,
                int64_t least) {
  bool fits = values.size() == count;
  for (const int64_t value : values) fits = fits && value >= least;
  STD_TORCH_CHECK(fits, op, ": ", what, " is [", text_of(values), "], expected ", count,
                  " numbers of at least ", least);
}

// Outputs of an axis of `size` inputs.
int64_t outputs_of(const WindowAxis& axis, int64_t after) {
  const int64_t room = axis.size + axis.before + after - (axis.kernel - 1) * axis.dilation - 1;
  return room < 0 ? 0 : room / axis.stride + 1;
}

std::vector<int64_t> sizes_of(const Tensor& x) {
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < x.dim(); ++i) sizes.push_back(x.size(i));
  return sizes;
}

}  // namespace

Windows windows_of(const char* op, std::span<const int64_t> shape, const WindowArguments& how,
                   int64_t groups) {
  const size_t count = how.kernel.size();
  STD_TORCH_CHECK(count >= 1 && count <= kMostAxes, op, ": kernel has ", count,
                  " sizes, expected one for each of 1 to 3 axes");
  STD_TORCH_CHECK(shape.size() == count + 2, op, ": x has shape ", text_of(shape),
                  ", expected a batch, channels and ", count, " axes");
  check_each(op, "kernel", how.kernel, count, 1);
  check_each(op, "stride", how.stride, count, 1);
  check_each(op, "padding", how.padding, 2 * count, 0);
  check_each(op, "dilation", how.dilation, count, 1);
  STD_TORCH_CHECK(groups > 0 && shape[1] % groups == 0, op, ": x has ", shape[1],
                  " channels, which ", groups, " groups do not divide");
  Windows of = {shape[0], shape[1] / groups, {}, {}, {}};
  const std::array<WindowAxis*, kMostAxes> axes = {&of.w, &of.h, &of.d};
  for (size_t i = 0; i < count; ++i) {
    const size_t from = count - 1 - i;
    WindowAxis& axis = *axes[i];
    axis = {shape[from + 2],    how.kernel[from],      how.stride[from],
            how.dilation[from], how.padding[2 * from], 1};
    axis.out = outputs_of(axis, how.padding[2 * from + 1]);
  }
  return of;
}

Windows windows_of(const char* op, const Tensor& x, const WindowArguments& how, int64_t groups) {
  return windows_of(op, sizes_of(x), how, groups);
}

Image image_at(const void* data, Dtype dtype, std::span<const int64_t> strides) {
  const size_t axes = strides.size() - 2;
  const auto step = [&](size_t back) {
    return back < axes ? strides[strides.size() - 1 - back] : 0;
  };
  return {static_cast<const char*>(data), dtype, strides[0], strides[1], step(2), step(1), step(0)};
}

Image image_of(const char* op, const Tensor& x) {
  std::vector<int64_t> strides;
  for (int64_t i = 0; i < x.dim(); ++i) strides.push_back(x.stride(i));
  return image_at(x.const_data_ptr(), dtype_of(op, x.scalar_type()), strides);
}

// [B, outputs, last].
std::vector<int64_t> shape_for(const Windows& of, size_t axes, int64_t last) {
  std::vector<int64_t> shape = {of.batch};
  if (axes > 2) shape.push_back(of.d.out);
  if (axes > 1) shape.push_back(of.h.out);
  shape.push_back(of.w.out);
  shape.push_back(last);
  return shape;
}

}  // namespace qfx::cpu
