#include "cpu/pack.h"

#include <algorithm>
#include <cstring>

#include "cpu/parallel.h"

namespace qfx::cpu {
namespace {

constexpr char kMagic[4] = {'Q', 'F', 'X', 'W'};
constexpr uint32_t kVersion = 1;
constexpr uint32_t kLayoutK4N32 = 1;

int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// One panel of 32 columns into blocks and column sums that are zero.
void pack_panel(const int8_t* w, int64_t columns, int64_t k, int64_t stride_n, int64_t stride_k,
                int32_t* colsum, int8_t* out) {
  constexpr int64_t kStep = kPanel * kGroup;
  const int64_t whole = stride_k == 1 ? k / kGroup * kGroup : 0;  // moved a group at a time
  constexpr int64_t kChunk = 256;  // of k: its block of 32 x 256 bytes stays in L1
  for (int64_t begin = 0; begin < whole; begin += kChunk) {
    const int64_t end = std::min(begin + kChunk, whole);
    for (int64_t n = 0; n < columns; ++n) {
      const int8_t* column = w + n * stride_n;
      int8_t* to = out + begin * kPanel + n * kGroup;
      for (int64_t i = begin; i < end; i += kGroup, to += kStep) {
        std::memcpy(to, column + i, kGroup);
      }
      for (int64_t i = begin; i < end; ++i) colsum[n] += column[i];
    }
  }
  for (int64_t i = whole; i < k; ++i) {
    int8_t* to = out + i / kGroup * kStep + i % kGroup;
    for (int64_t n = 0; n < columns; ++n) {
      const int8_t value = w[n * stride_n + i * stride_k];
      to[n * kGroup] = value;
      colsum[n] += value;
    }
  }
}

}  // namespace

int64_t packed_size(int64_t n, int64_t k) {
  const int64_t padded_n = round_up(n, kPanel);
  return static_cast<int64_t>(sizeof(PackedHeader)) + 4 * padded_n +
         padded_n * round_up(k, kKMultiple);
}

void pack(const int8_t* w, int64_t n, int64_t k, int64_t stride_n, int64_t stride_k, int8_t* out) {
  PackedHeader header = {{}, kVersion, kLayoutK4N32, 0, n, k, {}};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  std::memcpy(out, &header, sizeof(header));
  const int64_t padded_n = round_up(n, kPanel), padded_k = round_up(k, kKMultiple);
  int32_t* colsum = reinterpret_cast<int32_t*>(out + sizeof(header));
  int8_t* blocks = out + sizeof(header) + 4 * padded_n;
  std::memset(colsum, 0, 4 * padded_n);
  constexpr int64_t kStepsPerElement = 8;  // in parallel.h's unit
  parallel(padded_n / kPanel, n * k * kStepsPerElement, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin * kPanel; p < end * kPanel; p += kPanel) {
      int8_t* block = blocks + p * padded_k;
      std::memset(block, 0, kPanel * padded_k);
      pack_panel(w + p * stride_n, std::min<int64_t>(kPanel, n - p), k, stride_n, stride_k,
                 colsum + p, block);
    }
  });
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
           std::to_string(header.version) + ", this build reads layout 1 (K4N32) version 1";
  }
  const int64_t limit = int64_t{1} << 40;
  if (header.n < 0 || header.n > limit || header.k < 0 || header.k > kMaxK) {
    return "its header says N=" + std::to_string(header.n) + " K=" + std::to_string(header.k);
  }
  if (size != packed_size(header.n, header.k)) {
    return "it has " + std::to_string(size) + " bytes, N=" + std::to_string(header.n) +
           " K=" + std::to_string(header.k) + " takes " +
           std::to_string(packed_size(header.n, header.k));
  }
  const int8_t* colsum = data + sizeof(header);
  *weight = {header.n, header.k, round_up(header.k, kKMultiple),
             reinterpret_cast<const int32_t*>(colsum), colsum + 4 * round_up(header.n, kPanel)};
  return "";
}

}  // namespace qfx::cpu
