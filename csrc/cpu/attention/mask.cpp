#include "cpu/attention/mask.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "cpu/core/scratch.h"
#include "cpu/kernels/tables/attention.h"

namespace qfx::cpu {
namespace {

int64_t element_of(const Mask& mask) { return mask.kind == Mask::Kind::kBool ? 1 : 4; }

// Row m with its elements side by side: the mask's own memory, or memory of the calling thread.
const char* contiguous_row(const Mask& mask, int64_t m, int64_t keys) {
  const int64_t element = element_of(mask);
  if (mask.column_stride == element) return mask.row(m);
  thread_local Scratch scratch;
  char* out = scratch.get<char>(keys * element);
  const char* from = mask.row(m);
  if (element == 1) {
    for (int64_t n = 0; n < keys; ++n) out[n] = from[n * mask.column_stride];
  } else {
    for (int64_t n = 0; n < keys; ++n) {
      std::memcpy(out + n * sizeof(float), from + n * mask.column_stride, sizeof(float));
    }
  }
  return out;
}

bool hidden(float added) { return added == -std::numeric_limits<float>::infinity(); }

template <typename T>
bool plain(T element) {
  if constexpr (sizeof(T) == 1) return element != 0;
  return element == 0;  // -0 too
}

// Of the axes from this one on, the last of which has the least stride.
template <typename T>
bool all_plain(const char* data, const MaskAxis* axis, const MaskAxis* last) {
  bool every = true;
  if (axis == last && axis->stride == sizeof(T)) {
    constexpr int64_t kAtOnce = 1024;
    const T* elements = reinterpret_cast<const T*>(data);
    for (int64_t i = 0; i < axis->size && every; i += kAtOnce) {
      const int64_t end = std::min(i + kAtOnce, axis->size);
      for (int64_t n = i; n < end; ++n) every &= plain(elements[n]);
    }
    return every;
  }
  for (int64_t i = 0; i < axis->size && every; ++i, data += axis->stride) {
    every = axis == last ? plain(*reinterpret_cast<const T*>(data))
                         : all_plain<T>(data, axis + 1, last);
  }
  return every;
}

// Whether the row is byte for byte the one before it.
bool repeats(const Mask& mask, int64_t m, int64_t keys) {
  if (m == 0) return false;
  if (mask.row_stride == 0) return true;
  const int64_t element = element_of(mask);
  return mask.column_stride == element &&
         std::memcmp(mask.row(m), mask.row(m - 1), keys * element) == 0;
}

}  // namespace

bool changes_nothing(Mask::Kind kind, const char* data, std::vector<MaskAxis> axes) {
  if (kind == Mask::Kind::kNone) return true;
  std::erase_if(axes, [](const MaskAxis& axis) { return axis.size == 1 || axis.stride == 0; });
  std::sort(axes.begin(), axes.end(),
            [](const MaskAxis& a, const MaskAxis& b) { return a.stride > b.stride; });
  if (axes.empty()) axes.push_back({1, 0});
  const MaskAxis *first = axes.data(), *last = first + axes.size() - 1;
  return kind == Mask::Kind::kBool ? all_plain<uint8_t>(data, first, last)
                                   : all_plain<float>(data, first, last);
}

void load_mask(const Kernels& kernels, const Mask& mask, int64_t m, int64_t keys, float* out) {
  const char* row = contiguous_row(mask, m, keys);
  if (mask.kind == Mask::Kind::kBool) {
    kernels.attention->mask_of_bools(reinterpret_cast<const uint8_t*>(row), keys, out);
  } else {
    kernels.attention->mask_of_floats(reinterpret_cast<const float*>(row), keys, out);
  }
}

PanelRange panels_seen(const float* added, int64_t keys) {
  const auto sees = [&](int64_t panel) {
    bool any = false;
    for (int64_t n = panel * kPanel; n < std::min(keys, (panel + 1) * kPanel); ++n) {
      any |= !hidden(added[n]);
    }
    return any;
  };
  PanelRange range = {0, (keys + kPanel - 1) / kPanel};
  while (range.end > 0 && !sees(range.end - 1)) --range.end;
  while (range.first < range.end && !sees(range.first)) ++range.first;
  return range;
}

bool all_see_the_same(const Kernels& kernels, const Mask& mask, int64_t rows, int64_t keys,
                      uint8_t* seen) {
  if (mask.kind == Mask::Kind::kNone) {
    std::fill_n(seen, keys, uint8_t{1});
    return rows > 0 && keys > 0;
  }
  thread_local Scratch scratch;
  float* added = scratch.get<float>(keys);
  bool any = false, same = true;
  for (int64_t m = 0; m < rows && same; ++m) {
    if (repeats(mask, m, keys)) continue;
    load_mask(kernels, mask, m, keys, added);
    for (int64_t n = 0; n < keys; ++n) {
      const bool visible = !hidden(added[n]);
      if (m == 0) seen[n] = visible;
      any |= visible;
      same &= visible == (seen[n] != 0);
    }
  }
  return any && same;
}

}  // namespace qfx::cpu
