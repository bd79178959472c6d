#include "cpu/gemm/linear_job.h"

#include <utility>

#include "cpu/gemm/group_product.h"
#include "cpu/gemm/lowbit_product.h"
#include "cpu/gemm/whole_product.h"

namespace qfx::cpu {
namespace {

// Exact sums of whole rows, in a scale each.
template <typename Source>
class WholeJob final : public LinearJob {
 public:
  template <typename... From>
  WholeJob(const Kernels& kernels, const Linear& linear, const float* scales, int64_t scale_stride,
           From&&... from)
      : to_(linear.to),
        w_(linear.w.whole),
        from_(std::forward<From>(from)...),
        sink_(kernels, w_, from_.rows, to_, scales, scale_stride, 0),
        work_(from_.rows, w_, sink_) {}

  Meeting meeting() const override { return {from_, {w_, work_}}; }

 private:
  const FloatOutput to_;
  const PackedWeight& w_;
  const Source from_;
  const FloatSink sink_;
  const WholeProduct work_;
};

// Sums of groups.
template <typename Source>
class GroupedJob final : public LinearJob {
 public:
  template <typename... From>
  GroupedJob(const Kernels& kernels, const Linear& linear, From&&... from)
      : w_(linear.w.shape()), from_(std::forward<From>(from)...), work_(work(kernels, linear)) {}

  Meeting meeting() const override { return {from_, {w_, *work_}}; }

 private:
  std::unique_ptr<PanelWork> work(const Kernels& kernels, const Linear& linear) const {
    if (linear.w.is_lowbit()) return lowbit_work(kernels, from_, {linear.w.few, linear.to}, 0);
    return grouped_work(kernels, from_, {linear.w.whole, linear.to}, 0);
  }

  const PackedWeight& w_;
  const Source from_;
  const std::unique_ptr<PanelWork> work_;
};

// How rows meet a weight in groups.
struct GroupedHow {
  const Format& format;
  bool with_sums;
};

GroupedHow grouped_how(const Kernels& kernels, const Weight& w, bool narrow, bool zero_points,
                       int64_t rows) {
  if (w.is_lowbit()) {
    const Format& format = lowbit_format_for(kernels, w.few, zero_points, rows);
    return {format, needs_sums(kernels, w.few, format)};
  }
  return {format_for(kernels, operands_of(w.whole, narrow), rows), w.whole.zero != nullptr};
}

}  // namespace

std::unique_ptr<LinearJob> job_of_codes(const Kernels& kernels, const CodesInOrder& from,
                                        const Linear& linear, GroupedMemory& memory) {
  const auto& [q, order, count, scale, zero, narrow] = from;
  const Weight& w = linear.w;
  if (w.one_scale()) {
    const Format& format = format_for(kernels, operands_of(w.whole, narrow), count);
    return std::make_unique<WholeJob<CodeRows>>(kernels, linear, scale.data, scale.stride_m, format,
                                                w.whole, q, order, zero.data, zero.stride_m, count,
                                                memory.rows);
  }
  const PackedWeight& shape = w.shape();
  const bool zeros = any(zero, count, shape.groups());
  const auto [format, with_sums] = grouped_how(kernels, w, narrow, zeros, count);
  return std::make_unique<GroupedJob<GroupedCodes>>(kernels, linear, format, shape, q, scale, zero,
                                                    count, with_sums, order, memory);
}

std::unique_ptr<LinearJob> job_of_floats(const Kernels& kernels, const FloatsOfJob& of,
                                         const Linear& linear, GroupedMemory& memory) {
  const auto& [x, spec, group] = of.from;
  const Weight& w = linear.w;
  if (w.one_scale()) {
    return std::make_unique<WholeJob<FloatRows>>(kernels, linear, of.scales, 1, kernels, w.whole, x,
                                                 spec, of.shared, of.scales, memory.rows);
  }
  const auto [format, with_sums] = grouped_how(kernels, w, spec.bits < 8, !spec.symmetric, x.rows);
  return std::make_unique<GroupedJob<GroupedFloats>>(kernels, linear, kernels, format, w.shape(), x,
                                                     spec, group != 0, of.shared, with_sums,
                                                     nullptr, memory);
}

}  // namespace qfx::cpu
