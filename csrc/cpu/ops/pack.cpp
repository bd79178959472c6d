// pack_weight, unpack_weight, weight_scale and cut_weight on the CPU.
#include <algorithm>
#include <tuple>
#include <utility>

#include "cpu/kernels/dispatch.h"
#include "cpu/ops/arguments.h"
#include "implement.h"

namespace qfx::cpu {
namespace {

constexpr const char* kPack = "pack_weight";

const int8_t* bytes_of(const Tensor& t) { return static_cast<const int8_t*>(t.const_data_ptr()); }

template <typename T>
T* written(Tensor* t) {
  return static_cast<T*>(t->mutable_data_ptr());
}

// What a weight is packed from, but its codes: contiguous, once they are checked.
struct Values {
  Tensor scale;
  std::optional<Tensor> zero_point, minimum;
};

// --- 8 bits ---

Tensor pack_whole(const Tensor& codes, const Values& values, int64_t group, bool scale_by_group) {
  STD_TORCH_CHECK(!values.minimum.has_value(), kPack,
                  ": a minimum is given for 8 bits, expected a "
                  "zero point or neither");
  const int64_t n = codes.size(0), k = codes.size(1);
  const PackedKind kind = {group, scale_by_group, values.zero_point.has_value()};
  const int64_t longest = group == 0 ? k : std::min(group, k);
  STD_TORCH_CHECK(!kind.zeros || longest <= kMaxGroup, kPack, ": a group of ", longest,
                  " with zero points is above ", kMaxGroup,
                  ", where its int32 sum could overflow; pack the weight in groups");
  Tensor packed = empty_packed(packed_size(n, k, kind));
  int8_t* out = written<int8_t>(&packed);
  const PackedParts from = {
      bytes_of(codes),
      n,
      k,
      codes.stride(0),
      codes.stride(1),
      values.scale.numel() > 0 ? floats(values.scale) : nullptr,
      kind.zeros && values.scale.numel() > 0 ? ints(*values.zero_point) : nullptr};
  know_whole(out, pack(from, kind, out));
  return packed;
}

// --- 4 and 5 bits ---

template <typename T>
void check_range(const char* what, const Tensor& t, int64_t bits) {
  const int limit = 1 << (bits - 1);
  const T* values = static_cast<const T*>(t.const_data_ptr());
  const auto outside = [&](T v) { return v < -limit || v >= limit; };
  const T* const end = values + t.numel();
  const T* const found = std::find_if(values, end, outside);
  STD_TORCH_CHECK(found == end, kPack, ": ", what, " have ", found == end ? 0 : +*found,
                  ", which is no code of ", bits, " bits: they lie in [", -limit, ", ", limit - 1,
                  "]");
}

// What holds scales and minimums.
Dtype half_type(const Tensor& scale, const std::optional<Tensor>& minimum) {
  const Kernels& kernels = kernels_of(current_isa());
  const auto of = [&](const char* what, const Tensor& t) {
    const std::optional<Dtype> found = half_type_of(kernels, floats(t), t.numel());
    STD_TORCH_CHECK(found.has_value(), kPack, ": ", what,
                    " has values that are neither all bfloat16 nor all float16: round them first");
    return *found;
  };
  const Dtype first = of("scale", scale);
  if (!minimum.has_value() || of("minimum", *minimum) == first) return first;
  const Tensor& wide = first == Dtype::kBFloat16 ? scale : *minimum;  // the other is float16
  STD_TORCH_CHECK(
      fits_float16(kernels, floats(wide), wide.numel()), kPack,
      ": scale and minimum are not of one type: neither bfloat16 nor float16 holds both");
  return Dtype::kFloat16;
}

Tensor pack_lowbit(const Tensor& given, const Values& values, int64_t bits, int64_t group,
                   bool scale_by_group) {
  const auto& [scale, zero_point, minimum] = values;
  const int64_t groups = (given.size(1) + group - 1) / group;
  STD_TORCH_CHECK(scale_by_group || scale.numel() == given.size(0) * groups, kPack,
                  ": scale has shape ", shape_of(scale), ", expected ", given.size(0), "x", groups,
                  ": one for each group of ", group, " of K=", given.size(1));
  STD_TORCH_CHECK(!zero_point.has_value() || !minimum.has_value(), kPack,
                  ": both zero_point and minimum are given, expected one of them");
  const Tensor codes = made_contiguous(given);
  check_range<int8_t>("codes", codes, bits);
  LowbitParts from = {bytes_of(codes), floats(scale), nullptr,
                      nullptr,         codes.size(0), codes.size(1)};
  Shift shift = Shift::kNone;
  if (zero_point.has_value()) {
    check_range<int32_t>("zero points", *zero_point, bits);
    from.zero = ints(*zero_point);
    shift = Shift::kZeroPoints;
  } else if (minimum.has_value()) {
    from.minimum = floats(*minimum);
    shift = Shift::kMinimums;
  }
  const LowbitKind kind = {bits, group, shift, half_type(scale, minimum)};
  Tensor packed = empty_packed(lowbit_size(from.n, from.k, kind));
  int8_t* out = written<int8_t>(&packed);
  know_whole(out, pack_lowbit(kernels_of(current_isa()), from, kind, out));
  return packed;
}

// --- the operators ---

Tensor pack_weight(Tensor codes, Tensor scale, std::optional<Tensor> zero_point,
                   std::optional<Tensor> minimum, int64_t bits, int64_t group) {
  check_cpu(kPack, "codes", codes);
  check_codes(kPack, codes, group);
  STD_TORCH_CHECK(bits == 8 || bits == 4 || bits == 5, kPack, ": bits=", bits,
                  ", expected 4, 5 or 8");
  STD_TORCH_CHECK(bits == 8 || is_lowbit_group(group), kPack, ": group=", group,
                  ", expected 32, 64 or 128 for ", bits, " bits");
  check_dtype(kPack, "scale", scale, {ScalarType::Float});
  const bool by_group = check_of_rows_or_groups(kPack, "scale", scale, codes, group);
  const auto check_like_scale = [&](const char* what, const Tensor& t, ScalarType dtype) {
    check_dtype(kPack, what, t, {dtype});
    STD_TORCH_CHECK(shape_of(t) == shape_of(scale), kPack, ": ", what, " has shape ", shape_of(t),
                    ", expected ", shape_of(scale), " as scale has");
  };
  if (zero_point.has_value()) check_like_scale("zero_point", *zero_point, ScalarType::Int);
  if (minimum.has_value()) check_like_scale("minimum", *minimum, ScalarType::Float);
  const Values values = {made_contiguous(scale), made_contiguous(zero_point),
                         made_contiguous(minimum)};
  if (bits == 8) return pack_whole(codes, values, group, by_group);
  return pack_lowbit(codes, values, bits, group, by_group);
}

struct Unpacked {
  Tensor codes, scale, zero_point, minimum;
  bool has_minimums = false;
};

// All of a weight, which is compared with its checksum first.
Unpacked unpacked(const char* op, Tensor packed, const std::vector<int64_t>& layout, int64_t k) {
  const Weight w = weight_of(op, &packed, packed, k, layout);
  const PackedWeight& shape = w.shape();
  const std::string fault = fault_of_contents(bytes_of(packed), packed.numel(), contents_of(w));
  STD_TORCH_CHECK(fault.empty(), op, ": not a packed weight of this build: ", fault);
  const std::vector<int64_t> each = {shape.n, shape.scale_by_group ? shape.groups() : 1};
  Unpacked to = {empty_on_cpu({shape.n, k}, ScalarType::Char),
                 empty_on_cpu(each, ScalarType::Float), empty_on_cpu(each, ScalarType::Int),
                 empty_on_cpu(each, ScalarType::Float)};
  int8_t* codes = written<int8_t>(&to.codes);
  float *scale = written<float>(&to.scale), *minimum = written<float>(&to.minimum);
  int32_t* zero = written<int32_t>(&to.zero_point);
  if (w.is_lowbit()) {
    unpack_lowbit(kernels_of(current_isa()), w.few, {codes, scale, zero, minimum});
    to.has_minimums = w.few.kind.shift == Shift::kMinimums;
  } else {
    unpack(w.whole, codes);
    unpack_values(w.whole, scale, zero);
    std::fill_n(minimum, to.minimum.numel(), 0.f);
  }
  return to;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> unpack_weight(Tensor weight, std::vector<int64_t> layout,
                                                         int64_t k) {
  Unpacked found = unpacked("unpack_weight", weight, layout, k);
  return {found.codes, found.scale, found.zero_point, found.minimum};
}

Tensor weight_scale(Tensor weight, int64_t n) {
  constexpr const char* op = "weight_scale";
  Weight opened;
  open_whole(op, kPack, &weight, [&](const int8_t* data, int64_t bytes, Contents* contents) {
    const std::string fault = open_weight(data, bytes, &opened);
    *contents = contents_of(opened);
    return fault;
  });
  opened = whole_weight_of(op, &weight, weight, opened.shape().k, n);
  Tensor scale = empty_on_cpu({n}, ScalarType::Float);
  float* out = written<float>(&scale);
  for (int64_t i = 0; i < n; i += kPanel) {
    std::copy_n(opened.whole.scales(i / kPanel), std::min<int64_t>(kPanel, n - i), out + i);
  }
  return scale;
}

void check_cut(const char* op, const char* what, int64_t place, int64_t end, int64_t multiple,
               const char* of) {
  const bool fits = multiple == 0 || place % multiple == 0 || place == end;
  STD_TORCH_CHECK(fits, op, ": ", what, "=", place, " falls inside ", of, " of ", multiple,
                  " elements of K=", end);
}

Tensor cut_weight(Tensor weight, std::vector<int64_t> layout, int64_t k, int64_t dim, int64_t begin,
                  int64_t end, int64_t rotation) {
  constexpr const char* op = "cut_weight";
  const WeightLayoutArgument known = layout_argument_of(op, layout);
  STD_TORCH_CHECK(dim == 0 || dim == 1, op, ": dim=", dim, ", expected 0 (rows) or 1 (columns)");
  const int64_t size = dim == 0 ? known.n : k;
  STD_TORCH_CHECK(0 <= begin && begin <= end && end <= size, op, ": begin=", begin,
                  " and end=", end, " are outside 0..", size);
  if (dim == 1) {
    for (const auto& [what, place] : {std::pair{"begin", begin}, std::pair{"end", end}}) {
      check_cut(op, what, place, size, known.group, "a group");
      check_cut(op, what, place, size, rotation, "a rotated block");
    }
  }
  Unpacked all = unpacked(op, weight, layout, k);
  const int64_t step = dim == 1 ? known.scale_group : 1;  // elements that a value is for
  const auto part = [&](Tensor& values) {
    if (step == 0) return values;
    const int64_t first = (begin + step - 1) / step, count = (end + step - 1) / step - first;
    return torch::stable::narrow(values, dim, first, count);
  };
  std::optional<Tensor> zero_point, minimum;
  if (all.has_minimums) {
    minimum = part(all.minimum);
  } else if (known.shift != 0) {
    zero_point = part(all.zero_point);
  }
  const Tensor codes = torch::stable::narrow(all.codes, dim, begin, end - begin);
  return pack_weight(codes, part(all.scale), zero_point, minimum, known.bits, known.group);
}

STABLE_TORCH_LIBRARY_IMPL(qfx, CPU, m) {
  implement<"pack_weight", &pack_weight>(m);
  implement<"unpack_weight", &unpack_weight>(m);
  implement<"weight_scale", &weight_scale>(m);
  implement<"cut_weight", &cut_weight>(m);
}

}  // namespace
}  // namespace qfx::cpu
