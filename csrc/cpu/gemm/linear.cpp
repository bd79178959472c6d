#include "cpu/gemm/linear.h"

#include <vector>

#include "cpu/core/scratch.h"

namespace qfx::cpu {
namespace {

// f(those that follow each other and are alike), so that rows are made ready once for these.
template <typename T, typename Alike, typename F>
void for_each_kind(std::span<const T> all, const Alike& alike, const F& f) {
  for (size_t begin = 0, end = 0; begin < all.size(); begin = end) {
    while (end < all.size() && alike(all[begin], all[end])) ++end;
    f(all.subspan(begin, end - begin));
  }
}

}  // namespace

void linears_of_rows(const Kernels& kernels, const FloatMatrix& x, const CodeSpec& spec,
                     std::span<const Linear> all, float* scales, const Streaming* how) {
  TensorCode shared{};
  if (spec.per_tensor) shared = choose_tensor_code(kernels, x, spec, scales);
  in_chunks(kernels, all[0].w, x.rows, [&](int64_t first, int64_t count) {
    const TensorCode part = spec.per_tensor ? shared.part(first) : shared;
    const TensorCode* same = spec.per_tensor ? &part : nullptr;
    const auto alike = [](const Linear& a, const Linear& b) { return a.w.narrow == b.w.narrow; };
    for_each_kind(all, alike, [&](std::span<const Linear> some) {
      FloatRows from(kernels, some[0].w, x.part(first, count), spec, same, scales + first);
      from.rows.tuning = with_streaming(from.rows.tuning, how);
      std::vector<FloatSink> sinks;
      std::vector<Product> products;
      sinks.reserve(some.size());
      for (const auto& [w, to] : some) {
        products.push_back({w, sinks.emplace_back(kernels, w, from.rows, to, scales, 1, first)});
      }
      gemm(from, products);
    });
  });
}

void lowbit_linears_of_rows(const Kernels& kernels, const FloatMatrix& x, const CodeSpec& spec,
                            int64_t group, std::span<const LowbitLinear> all,
                            const Streaming* how) {
  thread_local Scratch scratch;
  TensorCode shared{};
  const bool per_tensor = spec.per_tensor && group == 0;
  if (per_tensor) {
    shared = choose_tensor_code(kernels, x, spec, scratch.get<float>(x.rows));
  }
  in_chunks(kernels, all[0].w.shape, x.rows, [&](int64_t first, int64_t count) {
    const TensorCode part = per_tensor ? shared.part(first) : shared;
    const auto alike = [](const LowbitLinear& a, const LowbitLinear& b) {
      return a.w.kind.group == b.w.kind.group && a.w.kind.shift == b.w.kind.shift &&
             a.w.shape.narrow == b.w.shape.narrow;
    };
    for_each_kind(all, alike, [&](std::span<const LowbitLinear> some) {
      const LowbitWeight& w = some[0].w;
      const Format& format = lowbit_format_for(kernels, w, !spec.symmetric, count);
      const GroupedFloats rows(kernels, format, w.shape, x.part(first, count), spec, group != 0,
                               per_tensor ? &part : nullptr, needs_sums(kernels, w, format),
                               nullptr);
      lowbit_linears(kernels, rows, some, first, how);
    });
  });
}

}  // namespace qfx::cpu
