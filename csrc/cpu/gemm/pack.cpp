#include "cpu/gemm/pack.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "cpu/core/parallel.h"
#include "types.h"

namespace qfx::cpu {
namespace {

// Groups of 4 k of 32 columns that lie side by side.
void pack_side_by_side(const int8_t* w, int64_t groups, int64_t stride_k, int32_t* colsum,
                       int8_t* out) {
  for (int64_t g = 0; g < groups; ++g, w += kGroup * stride_k, out += kPanel * kGroup) {
    uint32_t group[kPanel] = {};
    for (int64_t i = 0; i < kGroup; ++i) {
      for (int64_t n = 0; n < kPanel; ++n) {
        group[n] |= static_cast<uint32_t>(static_cast<uint8_t>(w[i * stride_k + n])) << 8 * i;
        colsum[n] += w[i * stride_k + n];
      }
    }
    std::memcpy(out, group, sizeof(group));
  }
}

// Groups of 4 consecutive k of each column.
void pack_column_by_column(const int8_t* w, int64_t columns, int64_t groups, int64_t stride_n,
                           int32_t* colsum, int8_t* out) {
  constexpr int64_t kStep = kPanel * kGroup;
  constexpr int64_t kChunk = 64;  // groups: a block of 32 x 256 bytes stays in L1
  for (int64_t begin = 0; begin < groups; begin += kChunk) {
    const int64_t end = std::min(begin + kChunk, groups);
    for (int64_t n = 0; n < columns; ++n) {
      const int8_t* column = w + n * stride_n;
      int8_t* to = out + n * kGroup;
      for (int64_t g = begin; g < end; ++g)
        std::memcpy(to + g * kStep, column + g * kGroup, kGroup);
      int32_t sum = 0;
      for (int64_t k = begin * kGroup; k < end * kGroup; ++k) sum += column[k];
      colsum[n] += sum;
    }
  }
}

uint32_t magnitude_of(const int8_t* block, int64_t size) {
  int8_t low = 0, high = 0;
  for (int64_t i = 0; i < size; ++i) {
    low = std::min(low, block[i]);
    high = std::max(high, block[i]);
  }
  return static_cast<uint32_t>(std::max<int>(high, -low));
}

// The column sums of each group of k of a packed panel.
void sum_groups(const int8_t* block, int64_t k, int64_t group, int32_t* sums) {
  for (int64_t begin = 0; begin < k; begin += group, sums += kPanel) {
    std::fill_n(sums, kPanel, 0);
    const int8_t* quads = block + begin * kPanel;
    for (int64_t i = begin; i < std::min(begin + group, k); i += kGroup, quads += kPanel * kGroup) {
      for (int64_t n = 0; n < kPanel; ++n) {
        for (int64_t j = 0; j < kGroup; ++j) sums[n] += quads[n * kGroup + j];
      }
    }
  }
}

// Values [N, S] of panel p, group by group, or `instead` where there are none; what lies beyond N
// is zero.
template <typename T>
void place_values(const T* values, T instead, int64_t n, int64_t groups, int64_t p, T* to) {
  const int64_t columns = std::min<int64_t>(kPanel, n - p * kPanel);
  for (int64_t g = 0; g < groups; ++g, to += kPanel) {
    for (int64_t i = 0; i < kPanel; ++i) {
      to[i] = i >= columns        ? T{}
              : values == nullptr ? instead
                                  : values[(p * kPanel + i) * groups + g];
    }
  }
}

template <typename T>
void take_values(const T* panel, int64_t step, int64_t columns, int64_t groups, T* to) {
  for (int64_t i = 0; i < columns; ++i) {
    for (int64_t g = 0; g < groups; ++g) to[i * groups + g] = panel[g * step + i];
  }
}

}  // namespace

void pack_panel(const int8_t* w, int64_t columns, int64_t k, int64_t stride_n, int64_t stride_k,
                int32_t* colsum, int8_t* block) {
  std::memset(colsum, 0, kPanel * sizeof(*colsum));
  std::fill_n(block, kPanel * padded_k(k), int8_t{0});  // block may be null for k = 0
  const bool side_by_side = stride_n == 1 && columns == kPanel;
  const int64_t groups = side_by_side || stride_k == 1 ? k / kGroup : 0;
  if (side_by_side) {
    pack_side_by_side(w, groups, stride_k, colsum, block);
  } else {
    pack_column_by_column(w, columns, groups, stride_n, colsum, block);
  }
  for (int64_t i = groups * kGroup; i < k; ++i) {
    int8_t* to = block + i / kGroup * (kPanel * kGroup) + i % kGroup;
    for (int64_t n = 0; n < columns; ++n) {
      const int8_t value = w[n * stride_n + i * stride_k];
      to[n * kGroup] = value;
      colsum[n] += value;
    }
  }
}

int64_t packed_size(int64_t n, int64_t k, const PackedKind& kind) {
  const int64_t panel = kind.values(k) + kind.codes(k);
  return static_cast<int64_t>(sizeof(PackedHeader)) + round_up(n, kPanel) / kPanel * panel;
}

uint64_t pack(const PackedParts& from, const PackedKind& kind, int8_t* out) {
  const int64_t n = from.n, k = from.k;
  std::atomic<uint32_t> magnitude = 0;
  std::atomic<uint64_t> contents = 0;
  const int64_t scales = kind.scales(k), of_values = kind.values(k), of_codes = kind.codes(k);
  int8_t* const values = out + sizeof(PackedHeader);
  constexpr int64_t kStepsPerElement = 8;  // in parallel.h's unit
  // Of panels without groups there may be any number.
  const int64_t count = of_values == 0 ? 0 : round_up(n, kPanel) / kPanel;
  int8_t* const codes = values + count * of_values;
  const auto sum_of = [&](const int8_t* part, int64_t bytes) {
    return checksum(part, bytes / kChecked, (part - values) / kChecked);
  };
  parallel(count, n * k * kStepsPerElement, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      int8_t *front = values + p * of_values, *block = codes + p * of_codes;
      float* of_scale = reinterpret_cast<float*>(front);
      int32_t* of_zero = reinterpret_cast<int32_t*>(of_scale + scales * kPanel);
      int32_t* sums = of_zero + (kind.zeros ? scales * kPanel : 0);
      int32_t all[kPanel];
      place_values(from.scale, 1.f, n, scales, p, of_scale);
      if (kind.zeros) place_values(from.zero, 0, n, scales, p, of_zero);
      pack_panel(from.codes + p * kPanel * from.stride_n, std::min<int64_t>(kPanel, n - p * kPanel),
                 k, from.stride_n, from.stride_k, kind.group == 0 ? sums : all, block);
      if (kind.group != 0) sum_groups(block, k, kind.group, sums);
      contents += sum_of(front, of_values) + sum_of(block, of_codes);
      const uint32_t here = magnitude_of(block, of_codes);
      uint32_t seen = magnitude;
      while (seen < here && !magnitude.compare_exchange_weak(seen, here)) {
      }
    }
  });
  PackedHeader header = {};
  header.version = kWeightVersion;
  header.bits = 8;
  header.shift = static_cast<uint32_t>(kind.zeros ? Shift::kZeroPoints : Shift::kNone);
  header.magnitude = magnitude;
  header.n = n, header.k = k;
  header.group = kind.group;
  header.scale_group = kind.scale_by_group ? kind.group : 0;
  header.contents = contents;
  write_header(header, kWeightMagic, out);
  return contents;
}

PackedKind packed_kind_of(const PackedHeader& header) {
  return {header.group, header.scale_group != 0,
          header.shift == static_cast<uint32_t>(Shift::kZeroPoints)};
}

PackedWeight packed_weight_of(const PackedHeader& header, const int8_t* data) {
  const PackedKind kind = packed_kind_of(header);
  const int64_t k = header.k, depth = padded_k(k), of_scales = kind.scales(k) * kPanel;
  const int8_t* values = data + sizeof(header);
  const float* scale = reinterpret_cast<const float*>(values);
  const int32_t* zero = reinterpret_cast<const int32_t*>(scale + of_scales);
  PackedWeight w = {header.n, k, depth, header.magnitude <= kNarrow, zero, values};
  w.blocks += w.panels() * kind.values(k);
  w.scale = scale;
  w.value_step = kind.values(k) / 4;
  if (kind.zeros) w.zero = zero, w.colsum = zero + of_scales;
  w.group = kind.group != 0 ? kind.group : std::max<int64_t>(depth, kKMultiple);
  w.scale_by_group = kind.scale_by_group;
  w.contents = header.contents;
  return w;
}

void unpack(const PackedWeight& w, int8_t* codes) {
  for (int64_t n = 0; w.k > 0 && n < w.n; ++n) {
    const int8_t* panel = w.panel(n / kPanel) + n % kPanel * kGroup;
    for (int64_t k = 0; k < w.k; ++k) {
      codes[n * w.k + k] = panel[k / kGroup * (kPanel * kGroup) + k % kGroup];
    }
  }
}

void unpack_values(const PackedWeight& w, float* scale, int32_t* zero) {
  const int64_t groups = w.scale_by_group ? w.groups() : 1;
  for (int64_t p = 0; groups > 0 && p < w.panels(); ++p) {
    const int64_t columns = std::min<int64_t>(kPanel, w.n - p * kPanel), at = p * kPanel * groups;
    take_values(w.scales(p), kPanel, columns, groups, scale + at);
    if (w.zero != nullptr) take_values(w.zeros(p), kPanel, columns, groups, zero + at);
  }
  if (w.zero == nullptr) std::fill_n(zero, w.n * groups, 0);
}

}  // namespace qfx::cpu
