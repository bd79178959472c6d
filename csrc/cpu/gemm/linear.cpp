#include "cpu/gemm/linear.h"

#include <vector>

#include "cpu/core/scratch.h"
#include "cpu/gemm/group_product.h"
#include "cpu/gemm/lowbit_product.h"

namespace qfx::cpu {
namespace {

// Whether rows that are made ready for one of them serve the other.
bool alike(const Weight& a, const Weight& b) {
  if (a.bits != b.bits && (a.bits == 8 || b.bits == 8)) return false;
  if (a.is_lowbit())
    return a.few.kind.group == b.few.kind.group && a.few.kind.shift == b.few.kind.shift;
  return a.cut == b.cut && a.whole.group == b.whole.group &&
         (a.whole.zero == nullptr) == (b.whole.zero == nullptr) && a.whole.narrow == b.whole.narrow;
}

// Some linears that are alike, as the product of their kind takes them.
template <typename Each>
std::vector<Each> linears_of(std::span<const Linear> all) {
  std::vector<Each> found;
  found.reserve(all.size());
  for (const auto& [w, to] : all) {
    if constexpr (std::is_same_v<Each, LowbitLinear>) {
      found.push_back({w.few, to});
    } else {
      found.push_back({w.whole, to});
    }
  }
  return found;
}

// Rows [first, first + count) of floats, times weights that are alike.
class FloatChunk {
 public:
  FloatChunk(const Kernels& kernels, const QuantizedFloats& from, const TensorCode* shared,
             int64_t first, int64_t count, float* scales, double* sizes)
      : kernels_(kernels),
        from_(from),
        shared_(shared),
        first_(first),
        count_(count),
        scales_(scales),
        sizes_(sizes == nullptr ? nullptr : sizes + first) {}

  void run(std::span<const Linear> all, const Streaming* how) const {
    const Weight& w = all[0].w;
    if (w.is_lowbit()) return run_lowbit(all, how);
    if (w.grouped()) return run_grouped(all, how);
    run_whole(all, how);
  }

 private:
  FloatMatrix x() const { return from_.x.part(first_, count_); }

  void run_whole(std::span<const Linear> all, const Streaming* how) const {
    FloatRows rows(kernels_, all[0].w.whole, x(), from_.spec, shared_, scales_ + first_);
    rows.rows.tuning = with_streaming(rows.rows.tuning, how);
    std::vector<FloatSink> sinks;
    std::vector<Product> products;
    sinks.reserve(all.size());
    for (const auto& [w, to] : all) {
      sinks.emplace_back(kernels_, w.whole, rows.rows, to, scales_, 1, first_);
      products.push_back({w.whole, sinks.back()});
    }
    gemm(rows, products);
    for (int64_t m = 0; sizes_ != nullptr && m < count_; ++m) sizes_[m] = scales_[first_ + m];
  }

  void run_grouped(std::span<const Linear> all, const Streaming* how) const {
    const PackedWeight& w = all[0].w.whole;
    const Format& format = format_for(kernels_, operands_of(w, from_.spec.bits < 8), count_);
    GroupedFloats rows(kernels_, format, w, x(), from_.spec, from_.group != 0, shared_,
                       w.zero != nullptr, sizes_);
    rows.rows.tuning = with_streaming(rows.rows.tuning, how);
    grouped_linears(kernels_, rows, linears_of<GroupedLinear>(all), first_);
  }

  void run_lowbit(std::span<const Linear> all, const Streaming* how) const {
    const LowbitWeight& w = all[0].w.few;
    const Format& format = lowbit_format_for(kernels_, w, !from_.spec.symmetric, count_);
    const GroupedFloats rows(kernels_, format, w.shape, x(), from_.spec, from_.group != 0, shared_,
                             needs_sums(kernels_, w, format), sizes_);
    lowbit_linears(kernels_, rows, linears_of<LowbitLinear>(all), first_, how);
  }

  const Kernels& kernels_;
  const QuantizedFloats& from_;
  const TensorCode* shared_;
  const int64_t first_, count_;
  float* const scales_;
  double* const sizes_;
};

// f(those that follow each other and are alike).
template <typename F>
void for_each_kind(std::span<const Linear> all, const F& f) {
  for (size_t begin = 0, end = 0; begin < all.size(); begin = end) {
    while (end < all.size() && alike(all[begin].w, all[end].w)) ++end;
    f(all.subspan(begin, end - begin));
  }
}

}  // namespace

void linears_of_floats(const Kernels& kernels, const QuantizedFloats& from,
                       std::span<const Linear> all, const Streaming* how, double* sizes) {
  thread_local Scratch scratch;
  const FloatMatrix& x = from.x;
  float* scales = scratch.get<float>(std::max<int64_t>(x.rows, 1));
  const bool per_tensor = from.spec.per_tensor && from.group == 0;
  TensorCode shared{};
  if (per_tensor) shared = choose_tensor_code(kernels, x, from.spec, scales);
  in_chunks(kernels, all[0].w.shape(), x.rows, [&](int64_t first, int64_t count) {
    const TensorCode part = per_tensor ? shared.part(first) : shared;
    const TensorCode* same = per_tensor ? &part : nullptr;
    const FloatChunk chunk(kernels, from, same, first, count, scales, sizes);
    for_each_kind(all, [&](std::span<const Linear> some) { chunk.run(some, how); });
  });
}

void linear_of_codes(const Kernels& kernels, const CodeMatrix& from, const Linear& linear) {
  const auto& [weight, to] = linear;
  const PackedWeight& w = weight.shape();
  in_chunks(kernels, w, from.rows, [&](int64_t first, int64_t count) {
    const int8_t* q = from.q + first * w.k;
    const RowValues<float> scales = from.scale.from(first);
    const RowValues<int32_t> zeros = from.zero.from(first);
    if (weight.one_scale()) {
      const CodeRows rows(kernels, w, q, zeros.data, zeros.stride_m, count);
      const FloatSink sink(kernels, w, rows.rows, to, from.scale.data, from.scale.stride_m, first);
      return gemm(rows, w, sink);
    }
    if (weight.is_lowbit()) {
      const Format& format =
          lowbit_format_for(kernels, weight.few, any(zeros, count, w.groups()), count);
      const GroupedCodes rows(format, w, q, scales, zeros, count,
                              needs_sums(kernels, weight.few, format));
      const LowbitLinear all[] = {{weight.few, to}};
      return lowbit_linears(kernels, rows, all, first);
    }
    const GroupedCodes rows(format_of_codes(kernels, w, q, count), w, q, scales, zeros, count,
                            w.zero != nullptr);
    const GroupedLinear all[] = {{w, to}};
    grouped_linears(kernels, rows, all, first);
  });
}

}  // namespace qfx::cpu
