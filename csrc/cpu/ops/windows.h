// The windows of a convolution as operators and generated code are told them.
#pragma once

#include <span>
#include <vector>

#include "cpu/conv/geometry.h"
#include "cpu/ops/arguments.h"

namespace qfx::cpu {

// A number for each axis; of `padding` two, before and after it.
struct WindowArguments {
  std::vector<int64_t> kernel, stride, padding, dilation;
};

// Of an image [B, C, sizes], in groups of channels. `shape` is compared with the rest.
Windows windows_of(const char* op, std::span<const int64_t> shape, const WindowArguments& how,
                   int64_t groups);
Windows windows_of(const char* op, const Tensor& x, const WindowArguments& how, int64_t groups);

// `strides`: of [B, C, sizes], in elements.
Image image_at(const void* data, Dtype dtype, std::span<const int64_t> strides);
Image image_of(const char* op, const Tensor& x);

// [B, outputs, last], for so many axes.
std::vector<int64_t> shape_for(const Windows& of, size_t axes, int64_t last);

}  // namespace qfx::cpu
