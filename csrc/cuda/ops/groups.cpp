// Products of codes with a weight whose groups of K have scales of their own, or which has zero
// points. (E3)
#include <algorithm>

#include "cuda/ops/product.h"

namespace qfx::cuda {
namespace {

// Of a weight packed without groups all of K is one.
int64_t group_of(const WeightLayout& layout) {
  return layout.group == 0 ? WeightLayout::of(0, layout.k, kMaxK, 0, false).group : layout.group;
}

// [N][S], S = 1 where one value is for all groups.
template <typename T>
PerGroup<T> values_of(const T* data, int64_t columns, bool of_groups) {
  return {data, columns, of_groups ? 1 : 0};
}

GroupTerms terms_of(const PackedWeight& w) {
  GroupTerms terms = {};
  const int64_t groups = w.layout.groups(), scales = w.layout.scales();
  terms.group = group_of(w.layout);
  terms.colsum = w.group_sums == nullptr ? values_of(w.colsum, 1, false)
                                         : values_of(w.group_sums, groups, true);
  terms.scale = values_of(w.scale, scales, w.layout.group_scales);
  terms.w_zero = values_of(w.zero_point, scales, w.layout.group_scales);
  return terms;
}

}  // namespace

void run_groups(const OnDevice& device, const Tensor& like, const Sizes& size, const Rows& a,
                const PackedWeight& w, const PerRow<int32_t>& zero, const Output& out) {
  if (size.m * size.n == 0) return;
  GroupTerms terms = terms_of(w);
  terms.zero = zero;
  const int64_t k = w.layout.k, count = ceil_div(k, terms.group) * size.m;
  std::optional<Tensor> sums;
  if (w.zero_point != nullptr && count > 0) {
    sums = empty_beside(like, {count}, ScalarType::Int);
    sum_groups_of_rows(a, zero, size.m, k, terms.group, data_of<int32_t>(*sums), device.stream());
    terms.row_sums = data_of<int32_t>(*sums);
  }
  const TileShape shape = size.m <= 16 ? TileShape::k16x64 : TileShape::k64x64;
  multiply_groups(size, a, rows_of_weight(w), terms, out, shape, device.stream());
}

}  // namespace qfx::cuda
