#include "cpu/gemm/pack.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "cpu/core/checksum.h"
#include "cpu/core/parallel.h"
#include "types.h"

namespace qfx::cpu {
namespace {

constexpr char kMagic[4] = {'Q', 'F', 'X', 'W'};
constexpr uint32_t kVersion = 3;
constexpr uint32_t kLayoutK4N32 = 1;

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

uint64_t sum_of(PackedHeader header) {
  header.sum = 0;
  return checksum(&header, sizeof(header) / kChecked);
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

int64_t packed_size(int64_t n, int64_t k, int64_t group) {
  const int64_t padded_n = round_up(n, kPanel), sums = group > 0 ? 1 + (k + group - 1) / group : 1;
  return static_cast<int64_t>(sizeof(PackedHeader)) + 4 * padded_n * sums + padded_n * padded_k(k);
}

uint64_t pack(const int8_t* w, int64_t n, int64_t k, int64_t stride_n, int64_t stride_k,
              int8_t* out, int64_t group) {
  std::atomic<uint32_t> magnitude = 0;
  std::atomic<uint64_t> contents = 0;
  const int64_t padded_n = round_up(n, kPanel);
  int32_t* colsum = reinterpret_cast<int32_t*>(out + sizeof(PackedHeader));
  int8_t* blocks = out + sizeof(PackedHeader) + 4 * padded_n;
  int32_t* group_sums = reinterpret_cast<int32_t*>(blocks + padded_n * padded_k(k));
  const int64_t groups = group > 0 ? (k + group - 1) / group : 0;
  const auto sum_of = [&](const void* part, int64_t bytes) {
    const int64_t begin = static_cast<const int8_t*>(part) - out - sizeof(PackedHeader);
    return checksum(part, bytes / kChecked, begin / kChecked);
  };
  constexpr int64_t kStepsPerElement = 8;  // in parallel.h's unit
  parallel(padded_n / kPanel, n * k * kStepsPerElement, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin * kPanel; p < end * kPanel; p += kPanel) {
      int8_t* block = blocks + p * padded_k(k);
      pack_panel(w + p * stride_n, std::min<int64_t>(kPanel, n - p), k, stride_n, stride_k,
                 colsum + p, block);
      if (group > 0) sum_groups(block, k, group, group_sums + p * groups);
      contents += sum_of(colsum + p, 4 * kPanel) + sum_of(block, kPanel * padded_k(k)) +
                  sum_of(group_sums + p * groups, 4 * kPanel * groups);
      const uint32_t here = magnitude_of(block, kPanel * padded_k(k));
      uint32_t seen = magnitude;
      while (seen < here && !magnitude.compare_exchange_weak(seen, here)) {
      }
    }
  });
  PackedHeader header = {{}, kVersion, kLayoutK4N32, magnitude, n, k, group, contents, 0, 0};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  write_header(header, out);
  return contents;
}

void write_header(PackedHeader header, int8_t* out) {
  header.sum = sum_of(header);
  std::memcpy(out, &header, sizeof(header));
}

std::string fault_of(const PackedHeader& header) {
  if (header.reserved != 0) return "the reserved bytes of its header are not zero";
  if (header.sum != sum_of(header)) return "its header is damaged";
  return "";
}

void unpack(const PackedWeight& w, int8_t* out) {
  for (int64_t n = 0; n < w.n; ++n) {
    const int8_t* panel = w.panel(n / kPanel) + n % kPanel * kGroup;
    for (int64_t k = 0; k < w.k; ++k) {
      out[n * w.k + k] = panel[k / kGroup * (kPanel * kGroup) + k % kGroup];
    }
  }
}

std::string open_packed(const int8_t* data, int64_t size, PackedWeight* weight) {
  PackedHeader header;
  if (size < static_cast<int64_t>(sizeof(header))) {
    return "it has " + std::to_string(size) + " bytes, fewer than the header's 64";
  }
  std::memcpy(&header, data, sizeof(header));
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) {
    return "it does not start with the magic bytes QFXW that pack_weight writes";
  }
  if (header.version != kVersion || header.layout != kLayoutK4N32) {
    return "it has layout " + std::to_string(header.layout) + " version " +
           std::to_string(header.version) + ", this build reads layout 1 (K4N32) version 3";
  }
  const int64_t limit = int64_t{1} << 40;
  if (header.n < 0 || header.n > limit || header.k < 0 || header.k > kMaxK) {
    return "its header says N=" + std::to_string(header.n) + " K=" + std::to_string(header.k);
  }
  if (header.group < 0 || header.group > limit || header.group % kGroupMultiple != 0) {
    return "its header says groups of " + std::to_string(header.group);
  }
  const int64_t expected = packed_size(header.n, header.k, header.group);
  if (size != expected) {
    return "it has " + std::to_string(size) + " bytes, N=" + std::to_string(header.n) +
           " K=" + std::to_string(header.k) + " takes " + std::to_string(expected);
  }
  if (const std::string fault = fault_of(header); !fault.empty()) return fault;
  const int64_t padded_n = round_up(header.n, kPanel), depth = padded_k(header.k);
  const int32_t* colsum = reinterpret_cast<const int32_t*>(data + sizeof(header));
  const int8_t* blocks = data + sizeof(header) + 4 * padded_n;
  const bool grouped = header.group > 0;
  *weight = {header.n,
             header.k,
             depth,
             header.magnitude <= kNarrow,
             colsum,
             blocks,
             grouped ? header.group : std::max<int64_t>(depth, kKMultiple),
             grouped ? reinterpret_cast<const int32_t*>(blocks + padded_n * depth) : colsum,
             header.contents};
  return "";
}

}  // namespace qfx::cpu
