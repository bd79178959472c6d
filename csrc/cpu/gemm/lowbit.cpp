#include "cpu/gemm/lowbit.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>

#include "cpu/core/parallel.h"
#include "cpu/kernels/tables/rows.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kGroups[] = {32, 64, 128};
constexpr int64_t kLine = kPanel * kGroup;  // codes of 4 k of a panel

bool fits(const Kernels& kernels, const float* values, int64_t count, Dtype dtype) {
  for (int64_t i = 0; i < count; i += kPanel) {
    const int here = static_cast<int>(std::min<int64_t>(kPanel, count - i));
    uint16_t half[kPanel];
    float back[kPanel];
    kernels.lowbit->narrow(values + i, here, dtype, half);
    kernels.row->widen(half, dtype, here, back);
    if (std::memcmp(values + i, back, here * sizeof(float)) != 0) return false;
  }
  return true;
}

// One panel of a weight that is being packed.
class PanelWriter {
 public:
  PanelWriter(const Kernels& kernels, const LowbitParts& from, const LowbitKind& kind, int64_t p,
              uint8_t* out)
      : kernels_(kernels),
        from_(from),
        kind_(kind),
        groups_((from.k + kind.group - 1) / kind.group),
        first_(p * kPanel),
        columns_(static_cast<int>(std::min<int64_t>(kPanel, from.n - first_))),
        out_(out) {}

  void write() const {
    std::memset(out_, 0, kind_.panel(groups_));
    for (int64_t g = 0; g < groups_; ++g) {
      uint8_t* block = out_ + kind_.front(groups_) + g * kind_.block();
      write_halves(from_.scale, g, block);
      for (int n = 0; n < kPanel; ++n) write_codes(block, n, g);
      write_shifts(g);
    }
  }

 private:
  int64_t at(int n, int64_t g) const { return (first_ + n) * groups_ + g; }

  void write_halves(const float* values, int64_t g, uint8_t* row) const {
    float here[kPanel];
    for (int n = 0; n < columns_; ++n) here[n] = values[at(n, g)];
    kernels_.lowbit->narrow(here, columns_, kind_.scales, row);
  }

  // u of the zero point, which is what pads.
  uint8_t zero(int n, int64_t g) const {
    if (kind_.shift == Shift::kMinimums) return 0;
    if (n >= columns_ || from_.zero == nullptr) return kind_.middle();
    return static_cast<uint8_t>(from_.zero[at(n, g)] + kind_.middle());
  }

  void write_codes(uint8_t* block, int n, int64_t g) const {
    uint8_t* nibbles = block + kPanel * sizeof(uint16_t);
    uint8_t* fifth = nibbles + kind_.group / 2 * kPanel;
    const int8_t* codes = from_.codes + (first_ + n) * from_.k + g * kind_.group;
    const int64_t there = n < columns_ ? std::min(kind_.group, from_.k - g * kind_.group) : 0;
    for (int64_t k = 0; k < kind_.group; ++k) {
      const int u = k < there ? codes[k] + kind_.middle() : zero(n, g);
      const int64_t high = k / kGroup % 2;
      nibbles[k / 8 * kLine + n * kGroup + k % kGroup] |=
          static_cast<uint8_t>((u & 15) << 4 * high);
      if (kind_.bits == 4) continue;
      const int64_t bit = (k / 8 * 2 + high) * kLine + n * kGroup + k % kGroup;
      fifth[bit / 8] |= static_cast<uint8_t>(u >> 4 << bit % 8);
    }
  }

  void write_shifts(int64_t g) const {
    if (kind_.shift == Shift::kMinimums) {
      write_halves(from_.minimum, g, out_ + g * kPanel * sizeof(uint16_t));
    } else if (kind_.shift == Shift::kZeroPoints) {
      for (int n = 0; n < kPanel; ++n) out_[g * kPanel + n] = zero(n, g);
    }
  }

  const Kernels& kernels_;
  const LowbitParts& from_;
  const LowbitKind& kind_;
  const int64_t groups_, first_;
  const int columns_;
  uint8_t* const out_;
};

int code_at(const LowbitWeight& w, const uint8_t* block, int64_t n, int64_t k) {
  const uint8_t* nibbles = block + kPanel * sizeof(uint16_t);
  const int64_t high = k / kGroup % 2, place = n * kGroup + k % kGroup;
  int u = nibbles[k / 8 * kLine + place] >> 4 * high & 15;
  if (w.kind.bits == 5) {
    const uint8_t* fifth = nibbles + w.kind.group / 2 * kPanel;
    const int64_t bit = (k / 8 * 2 + high) * kLine + place;
    u |= (fifth[bit / 8] >> bit % 8 & 1) << 4;
  }
  return u - w.kind.middle();
}

}  // namespace

int64_t LowbitKind::front(int64_t groups) const {
  constexpr int64_t kBytes[] = {0, 1, 2};  // of a shift
  return round_up(groups * kPanel * kBytes[static_cast<int>(shift)], 64);
}

const uint8_t* LowbitWeight::shifts(int64_t p) const {
  return kind.shift == Shift::kNone ? nullptr : panel(p);
}

const uint8_t* LowbitWeight::zero(int64_t p, int64_t g) const {
  static constexpr uint8_t kZeros[kPanel] = {};
  if (kind.shift == Shift::kMinimums) return kZeros;
  return kind.shift == Shift::kNone ? nullptr : shifts(p) + g * kPanel;
}

bool is_lowbit_group(int64_t group) {
  return std::find(std::begin(kGroups), std::end(kGroups), group) != std::end(kGroups);
}

int64_t lowbit_size(int64_t n, int64_t k, const LowbitKind& kind) {
  const int64_t groups = (k + kind.group - 1) / kind.group;
  return static_cast<int64_t>(sizeof(PackedHeader)) +
         round_up(n, kPanel) / kPanel * kind.panel(groups);
}

bool fits_float16(const Kernels& kernels, const float* values, int64_t count) {
  return fits(kernels, values, count, Dtype::kFloat16);
}

std::optional<Dtype> half_type_of(const Kernels& kernels, const float* values, int64_t count) {
  if (fits(kernels, values, count, Dtype::kBFloat16)) return Dtype::kBFloat16;
  if (fits_float16(kernels, values, count)) return Dtype::kFloat16;
  return std::nullopt;
}

uint64_t pack_lowbit(const Kernels& kernels, const LowbitParts& from, const LowbitKind& kind,
                     int8_t* out) {
  constexpr int64_t kStepsPerElement = 16;  // in parallel.h's unit
  const int64_t groups = (from.k + kind.group - 1) / kind.group;
  const int64_t size = kind.panel(groups);
  // Of panels without groups there may be any number.
  const int64_t count = groups == 0 ? 0 : round_up(from.n, kPanel) / kPanel;
  uint8_t* panels = reinterpret_cast<uint8_t*>(out) + sizeof(PackedHeader);
  std::atomic<uint64_t> contents = 0;
  parallel(count, from.n * from.k * kStepsPerElement, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      PanelWriter(kernels, from, kind, p, panels + p * size).write();
      contents += checksum(panels + p * size, size / kChecked, p * size / kChecked);
    }
  });
  PackedHeader header = {};
  header.version = kWeightVersion;
  header.bits = static_cast<uint32_t>(kind.bits);
  header.shift = static_cast<uint32_t>(kind.shift);
  header.scales = static_cast<uint32_t>(kind.scales);
  header.n = from.n, header.k = from.k;
  header.group = header.scale_group = kind.group;
  header.contents = contents;
  write_header(header, kWeightMagic, out);
  return contents;
}

void unpack_lowbit(const Kernels& kernels, const LowbitWeight& w, const LowbitUnpacked& to) {
  const int64_t groups = w.shape.groups(), panels = groups == 0 ? 0 : w.shape.panels();
  for (int64_t p = 0; p < panels; ++p) {
    const int columns = static_cast<int>(std::min<int64_t>(kPanel, w.shape.n - p * kPanel));
    for (int64_t g = 0; g < groups; ++g) {
      float scale[kPanel], minimum[kPanel] = {};
      kernels.row->widen(w.block(p, g), w.kind.scales, kPanel, scale);
      if (w.kind.shift == Shift::kMinimums) {
        kernels.row->widen(w.shifts(p) + g * kPanel * sizeof(uint16_t), w.kind.scales, kPanel,
                           minimum);
      }
      const uint8_t* zero = w.zero(p, g);
      for (int n = 0; n < columns; ++n) {
        const int64_t row = p * kPanel + n, at = row * groups + g;
        to.scale[at] = scale[n];
        to.minimum[at] = minimum[n];
        to.zero[at] = zero == nullptr ? 0 : zero[n] - w.kind.middle();
        int8_t* codes = to.codes + row * w.shape.k + g * w.kind.group;
        for (int64_t k = 0; k < w.length(g); ++k) {
          codes[k] = static_cast<int8_t>(code_at(w, w.block(p, g), n, k));
        }
      }
    }
  }
}

std::string fault_of_lowbit(const PackedHeader& header) {
  if (!is_lowbit_group(header.group) || header.scale_group != header.group) {
    return "its header says groups of " + std::to_string(header.group) + " and scales of " +
           std::to_string(header.scale_group) + ", expected 32, 64 or 128 for both";
  }
  const auto half = static_cast<Dtype>(header.scales);
  if (half != Dtype::kBFloat16 && half != Dtype::kFloat16) {
    return "its header says scales of type " + std::to_string(header.scales);
  }
  return "";
}

LowbitKind lowbit_kind_of(const PackedHeader& header) {
  return {header.bits, header.group, static_cast<Shift>(header.shift),
          static_cast<Dtype>(header.scales)};
}

LowbitWeight lowbit_weight_of(const PackedHeader& header, const int8_t* data) {
  PackedWeight shape = {header.n, header.k, padded_k(header.k), true, nullptr, nullptr};
  shape.group = header.group;
  shape.scale_by_group = true;
  shape.contents = header.contents;
  return {shape, lowbit_kind_of(header), reinterpret_cast<const uint8_t*>(data) + sizeof(header)};
}

}  // namespace qfx::cpu
