#include "cpu/gemm/group_rows.h"

#include <algorithm>
#include <cmath>

#include "cpu/core/scratch.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kStepsPerElement = 16;  // of quantizing and arranging, in parallel.h's unit

// The first of the formats that read groups of this length as they lie.
const Format& with_groups(const Format& format, const PackedWeight& w) {
  const Format* found = &format;
  while (found->below != nullptr && w.group % found->k_multiple != 0) {
    found = found->below;
  }
  return *found;
}

// Of the scales of all elements of a row.
double root_mean_square(const float* scale, const PackedWeight& w) {
  double sum = 0;
  for (int64_t g = 0, k = 0; k < w.k; ++g, k += w.group) {
    const double length = static_cast<double>(std::min(w.group, w.k - k));
    sum += length * scale[g] * scale[g];
  }
  return std::sqrt(sum / static_cast<double>(w.k));
}

int32_t sum_of(const int8_t* q, int64_t k) {
  int32_t sum = 0;
  for (int64_t i = 0; i < k; ++i) sum += q[i];
  return sum;
}

}  // namespace

bool any(const RowValues<int32_t>& values, int64_t rows, int64_t groups) {
  rows = values.stride_m == 0 ? 1 : rows;
  groups = values.stride_g == 0 ? 1 : groups;
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t g = 0; g < groups; ++g) {
      if (values.at(m, g) != 0) return true;
    }
  }
  return false;
}

GroupedMemory& grouped_memory() {
  thread_local GroupedMemory memory;
  return memory;
}

GroupedRows::GroupedRows(const Format& format, const PackedWeight& w, int64_t count, bool zeros,
                         bool with_zeros, GroupedMemory& memory)
    : RowSource(make_rows(with_groups(format, w), count, w, memory.rows)),
      w(w),
      with_zeros(with_zeros),
      tiles(w.group <= kLongestPaired ? rows.format->groups : nullptr),
      whole_rows_(rows.format->bytes_per_code == 1) {
  const int64_t size = w.groups() * count;
  add = memory.integers.get<int32_t>(4 * size);
  mul = add + size;
  sum = mul + size;
  pair = tiles != nullptr && (zeros || with_zeros) ? sum + size : nullptr;
  scale = memory.floats.get<float>(size);
  if (whole_rows_) std::fill_n(add, size, 0);
}

void GroupedRows::arrange(const int8_t* q, const RowValues<float>& scales,
                          const RowValues<int32_t>& zero_points, int64_t m) const {
  const Format& format = *rows.format;
  uint8_t* a = rows.a + m * rows.stride;
  const int64_t groups = w.groups(), step = rows.count;
  for (int64_t g = 0, at = m; g < groups; ++g, at += step) {
    const int64_t length = std::min(w.group, w.k - g * w.group);
    const uint32_t zero = static_cast<uint32_t>(zero_points.at(m, g));
    const uint32_t times = zero + static_cast<uint32_t>(format.mul_offset);
    const uint32_t less = with_zeros ? static_cast<uint32_t>(sum_of(q + g * w.group, length)) -
                                           zero * static_cast<uint32_t>(length)
                                     : 0;
    mul[at] = static_cast<int32_t>(times);
    sum[at] = static_cast<int32_t>(less);
    if (pair != nullptr) pair[at] = static_cast<int32_t>((times & 0xffff) | less << 16);
    scale[at] = scales.at(m, g);
    if (!whole_rows_) {
      add[at] = format.arrange(q + g * w.group, length, round_up(length, format.k_multiple),
                               a + g * w.group * format.bytes_per_code);
    }
  }
  if (whole_rows_) format.arrange(q, w.k, round_up(w.k, format.k_multiple), a);
}

int64_t GroupedRows::work() const { return rows.count * w.k * kStepsPerElement; }

GroupedCodes::GroupedCodes(const Format& format, const PackedWeight& w, const int8_t* q,
                           const RowValues<float>& scales, const RowValues<int32_t>& zero_points,
                           int64_t count, bool with_zeros, const int32_t* order,
                           GroupedMemory& memory)
    : GroupedRows(format, w, count, any(zero_points, count, w.groups()), with_zeros, memory),
      q(q),
      scales(scales),
      zero_points(zero_points),
      order(order) {}

void GroupedCodes::fill(int64_t begin, int64_t end) const {
  for (int64_t m = begin; m < end; ++m) {
    arrange(q + (order == nullptr ? m : order[m]) * w.k, scales, zero_points, m);
  }
}

GroupedFloats::GroupedFloats(const Kernels& kernels, const Format& format, const PackedWeight& w,
                             const FloatMatrix& x, const CodeSpec& spec, bool by_group,
                             const TensorCode* shared, bool with_zeros, double* sizes,
                             GroupedMemory& memory)
    : GroupedRows(format, w, x.rows, !spec.symmetric, with_zeros, memory),
      kernels(kernels),
      x(x),
      spec(spec),
      by_group(by_group),
      shared(shared),
      sizes(sizes) {}

void GroupedFloats::fill(int64_t begin, int64_t end) const {
  thread_local Scratch codes, scales, zeros;
  const int64_t groups = w.groups();
  const bool in_place = rows.format->bytes_per_code == 1;
  GroupCodes made = {in_place ? nullptr : codes.get<int8_t>(w.k), scales.get<float>(groups),
                     zeros.get<int32_t>(groups)};
  for (int64_t m = begin; m < end; ++m) {
    if (in_place) made.q = reinterpret_cast<int8_t*>(rows.a + m * rows.stride);
    if (by_group) {
      quantize_row_in_groups(kernels, x, m, spec, w.group, made);
    } else {
      RowCode code;
      quantize_rows(kernels, x, spec, shared, m, 1, &code, made.q, w.k);
      std::fill_n(made.scale, groups, code.scale);
      std::fill_n(made.zero_point, groups, code.zero_point);
    }
    if (sizes != nullptr) sizes[m] = root_mean_square(made.scale, w);
    arrange(made.q, {made.scale, 0, 1}, {made.zero_point, 0, 1}, m);
  }
}

}  // namespace qfx::cpu
