#include "cpu/binary_pack.h"

#include <cstring>

#include "cpu/pack.h"

namespace qfx::cpu {
namespace {

constexpr char kMagic[4] = {'Q', 'F', 'X', 'B'};
constexpr uint32_t kVersion = 1;
constexpr uint32_t kLayoutK32N32 = 1;

}  // namespace

int64_t packed_bits_size(int64_t n, int64_t k) {
  return static_cast<int64_t>(sizeof(PackedHeader)) +
         round_up(n, kPanel) * round_up(k, kBitGroup) / 8;
}

uint8_t* begin_packed_bits(int64_t n, int64_t k, int8_t* out) {
  PackedHeader header = {{}, kVersion, kLayoutK32N32, 0, n, k, 0, {}};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  std::memcpy(out, &header, sizeof(header));
  return reinterpret_cast<uint8_t*>(out) + sizeof(header);
}

void place_column(const uint8_t* bits, int64_t groups, int64_t n, uint8_t* block) {
  for (int64_t g = 0; g < groups; ++g) {
    std::memcpy(block + (g * kPanel + n) * kBitGroupBytes, bits + g * kBitGroupBytes,
                kBitGroupBytes);
  }
}

std::string open_packed_bits(const int8_t* data, int64_t size, PackedBits* weight) {
  PackedHeader header;
  if (size < static_cast<int64_t>(sizeof(header))) {
    return "it has " + std::to_string(size) + " bytes, fewer than the header's 64";
  }
  std::memcpy(&header, data, sizeof(header));
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) {
    return "it does not start with the magic bytes QFXB that binary_pack writes";
  }
  if (header.version != kVersion || header.layout != kLayoutK32N32) {
    return "it has layout " + std::to_string(header.layout) + " version " +
           std::to_string(header.version) + ", this build reads layout 1 (K32N32) version 1";
  }
  const int64_t limit = int64_t{1} << 31;
  if (header.n < 0 || header.n > limit || header.k < 0 || header.k > kMaxBinaryK) {
    return "its header says N=" + std::to_string(header.n) + " K=" + std::to_string(header.k);
  }
  if (size != packed_bits_size(header.n, header.k)) {
    return "it has " + std::to_string(size) + " bytes, N=" + std::to_string(header.n) +
           " K=" + std::to_string(header.k) + " takes " +
           std::to_string(packed_bits_size(header.n, header.k));
  }
  *weight = {header.n, header.k, reinterpret_cast<const uint8_t*>(data) + sizeof(header)};
  return "";
}

}  // namespace qfx::cpu
