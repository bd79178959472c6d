// Attention to all keys at once, as encoders have it: int8_attention, scaled_dot_product_attention.
#include "cpu/attention/attention.h"

#include "cpu/program/instruction.h"

namespace qfx::cpu {
namespace {

// [B, H, T, D], rows contiguous.
Operand heads_of(Words& words) {
  const Operand x = words.operand(Element::kFloat);
  expect(x.axes == 4 && x.elements() > 0 && (x.stride(3) == 1 || x.size(3) == 1),
         "an attention of other operands");
  return x;
}

FloatMatrix sizes_of(const Operand& x) {
  return {nullptr, Dtype::kFloat32, x.size(2), x.size(3), x.stride(2)};
}

char* head_of(const Operand& x, char* const* slots, int64_t b, int64_t h) {
  return x.in<char>(slots) + (b * x.stride(0) + h * x.stride(1)) * size_of(x.element);
}

struct Attend final : Instruction {
  Operand out, q, k, v, mask = {};
  bool in_int8, causal, has_mask;
  float scale;

  explicit Attend(Words& words)
      : out(words.written(heads_of(words))),
        q(heads_of(words)),
        k(heads_of(words)),
        v(heads_of(words)),
        in_int8(words.take() != 0) {
    scale = words.take_float();
    causal = words.take() != 0;
    has_mask = words.take() != 0;
    if (has_mask) mask = words.operand();
    const int64_t batch = q.size(0), heads = q.size(1), m = q.size(2), n = k.size(2);
    expect(out.size(0) == batch && out.size(1) == heads && out.size(2) == m &&
               out.size(3) == v.size(3) && k.size(0) == batch && v.size(0) == batch &&
               v.size(1) == k.size(1) && heads % k.size(1) == 0 && k.size(3) == q.size(3) &&
               v.size(2) == n && std::max(n, k.size(3)) <= kMaxK,
           "an attention of other sizes");
    expect(!in_int8 || out.contiguous(), "outputs in int8 that are apart");
    const bool known = mask.element == Element::kByte || mask.element == Element::kFloat;
    expect(!has_mask || (known && mask.axes == 4 && mask.size(0) == batch &&
                         mask.size(1) == heads && mask.size(2) == m && mask.size(3) == n),
           "a mask of other sizes");
  }

  double work() const override {
    const auto columns = static_cast<double>(k.size(3) + v.size(3));
    return static_cast<double>(q.size(0) * q.size(1) * q.size(2)) * static_cast<double>(k.size(2)) *
           columns;
  }

  Mask mask_in(char* const* slots) const {
    if (!has_mask) return {};
    const int64_t element = size_of(mask.element);
    const Mask::Kind kind = element == 1 ? Mask::Kind::kBool : Mask::Kind::kFloat;
    std::vector<MaskAxis> axes;
    for (int64_t d = 0; d < 4; ++d) axes.push_back({mask.size(d), mask.stride(d) * element});
    if (changes_nothing(kind, mask.in<char>(slots), std::move(axes))) return {};
    return {kind, nullptr, mask.stride(2) * element, mask.stride(3) * element};
  }

  void run(const Kernels& kernels, char* const* slots) const override {
    Attention a = {sizes_of(q),     sizes_of(k), sizes_of(v), mask_in(slots), scale, causal,
                   Dtype::kFloat32, {},          {}};
    const int64_t group = q.size(1) / k.size(1);
    for (int64_t b = 0; b < q.size(0); ++b) {
      for (int64_t h = 0; h < q.size(1); ++h) {
        if (h % group == 0) {
          a.keys.push_back({head_of(k, slots, b, h / group), head_of(v, slots, b, h / group)});
        }
        a.queries.push_back({head_of(q, slots, b, h),
                             has_mask ? head_of(mask, slots, b, h) : nullptr,
                             head_of(out, slots, b, h)});
      }
    }
    in_int8 ? attend(kernels, a) : attend_in_float_tiles(kernels, a, out.stride(2));
  }
};

}  // namespace

Made attention_of(Words& words) { return std::make_unique<Attend>(words); }

}  // namespace qfx::cpu
