#include "cpu/ops/alias_check.h"

#include <algorithm>

#include "operands.h"

namespace qfx::cpu {

// Where the elements of a tensor lie: a run of bytes, repeated along axes.
class Written::Layout {
 public:
  explicit Layout(const Tensor& t) : data_(static_cast<const char*>(t.const_data_ptr())) {
    if (t.numel() == 0) return;
    run_ = t.element_size();
    if (t.is_contiguous()) {
      run_ *= t.numel();
      return;
    }
    const auto sizes = t.sizes(), strides = t.strides();
    for (size_t d = 0; d < sizes.size(); ++d) {
      if (sizes[d] != 1) axes_.push_back({sizes[d], strides[d] * t.element_size()});
    }
    std::sort(axes_.begin(), axes_.end(), [](Axis a, Axis b) { return a.step < b.step; });
    const auto apart = std::find_if(axes_.begin(), axes_.end(), [&](Axis axis) {
      if (axis.step != run_) return true;
      run_ *= axis.size;
      return false;
    });
    axes_.erase(axes_.begin(), apart);
  }

  // Whether each axis steps over all that the smaller ones span, so that no two elements share
  // memory. Only torch.as_strided makes tensors of other axes whose elements do not either.
  bool is_ordered() const {
    int64_t span = run_;
    for (const Axis& axis : axes_) {
      if (axis.step < span) return false;
      span += axis.step * (axis.size - 1);
    }
    return true;
  }

  Run extent() const {
    int64_t span = run_;
    for (const Axis& axis : axes_) span += axis.step * (axis.size - 1);
    return {data_, data_ + span};
  }

  // Of an ordered layout, which has no more runs than its memory has bytes.
  void append_runs(std::vector<Run>* runs) const {
    int64_t count = run_ == 0 ? 0 : 1;
    for (const Axis& axis : axes_) count *= axis.size;
    for (int64_t i = 0; i < count; ++i) {
      const char* begin = data_;
      int64_t rest = i;
      for (const Axis& axis : axes_) {
        begin += rest % axis.size * axis.step;
        rest /= axis.size;
      }
      runs->push_back({begin, begin + run_});
    }
  }

  // The layouts without the largest axes that both have, where each step of those spans what both
  // touch: then they overlap where these do.
  static void drop_common(Layout* a, Layout* b) {
    while (!a->axes_.empty() && !b->axes_.empty()) {
      const Axis largest = a->axes_.back();
      if (largest.size != b->axes_.back().size || largest.step != b->axes_.back().step) return;
      Layout inner[] = {*a, *b};
      for (Layout& layout : inner) layout.axes_.pop_back();
      const Run first = inner[0].extent(), second = inner[1].extent();
      if (std::max(first.end, second.end) - std::min(first.begin, second.begin) > largest.step) {
        return;
      }
      *a = inner[0], *b = inner[1];
    }
  }

 private:
  struct Axis {
    int64_t size, step;  // in bytes
  };

  const char* data_;
  int64_t run_ = 0;
  std::vector<Axis> axes_;  // the smallest step first
};

// Exact, since heads of keys may alternate with heads of values in one memory, and pages of keys
// with pages of values.
bool Written::overlap(const Layout& a, const Layout& b) {
  if (!intersect(a.extent(), b.extent())) return false;
  Layout inner[] = {a, b};
  Layout::drop_common(inner, inner + 1);
  std::vector<Run> runs;
  for (const Layout& layout : inner) layout.append_runs(&runs);
  std::sort(runs.begin(), runs.end(), [](Run x, Run y) { return x.begin < y.begin; });
  return std::adjacent_find(runs.begin(), runs.end(), intersect) != runs.end();
}

Written::Written(const char* op, std::initializer_list<Argument> arguments) {
  std::vector<Layout> layouts;
  layouts.reserve(arguments.size());
  extents_.reserve(arguments.size());
  for (const auto& [name, tensor] : arguments) {
    const Layout& layout = layouts.emplace_back(tensor);
    STD_TORCH_CHECK(layout.is_ordered(), op, ": ", name, " is to be written, but elements of its ",
                    "shape ", shape_of(tensor), " share memory; pass a clone");
    for (size_t i = 0; i + 1 < layouts.size(); ++i) {
      STD_TORCH_CHECK(!overlap(layouts[i], layout), op, ": ", arguments.begin()[i].name, " and ",
                      name, " are both to be written, but share memory; pass a clone of one");
    }
    extents_.push_back(layout.extent());
  }
}

Tensor Written::apart_from(const Tensor& read) const {
  const Run extent = Layout(read).extent();
  const auto shared = [&](const Run& written) { return intersect(extent, written); };
  if (std::none_of(extents_.begin(), extents_.end(), shared)) return read;
  const std::vector<int64_t> shape(read.sizes().begin(), read.sizes().end());
  return allocated(shape, read.scalar_type(), [&] { return torch::stable::clone(read); });
}

}  // namespace qfx::cpu
