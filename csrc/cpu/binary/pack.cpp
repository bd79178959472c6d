#include "cpu/binary/pack.h"

#include <cstring>

#include "cpu/gemm/pack.h"

namespace qfx::cpu {
namespace {

constexpr char kMagic[4] = {'Q', 'F', 'X', 'B'};
constexpr uint32_t kVersion = 2;
constexpr uint32_t kLayoutK32N32 = 1;

struct BitsHeader {
  char magic[4];
  uint32_t version, layout, unused;
  int64_t n, k, none;
  uint64_t contents;     // checksum of what follows the header
  uint64_t reserved[1];  // 0
  uint64_t sum;          // checksum of the header, in which it is 0
};
static_assert(sizeof(BitsHeader) == kBitsHeader);

}  // namespace

int64_t packed_bits_size(int64_t n, int64_t k) {
  return static_cast<int64_t>(sizeof(BitsHeader)) +
         round_up(n, kPanel) * round_up(k, kBitGroup) / 8;
}

uint64_t finish_packed_bits(int64_t n, int64_t k, int8_t* out) {
  const int64_t header_bytes = sizeof(BitsHeader);
  const uint64_t contents =
      checksum(out + header_bytes, (packed_bits_size(n, k) - header_bytes) / kChecked);
  const BitsHeader header = {{}, kVersion, kLayoutK32N32, 0, n, k, 0, contents, {}, 0};
  write_header(header, kMagic, out);
  return contents;
}

void place_column(const uint8_t* bits, int64_t groups, int64_t n, uint8_t* block) {
  for (int64_t g = 0; g < groups; ++g) {
    std::memcpy(block + (g * kPanel + n) * kBitGroupBytes, bits + g * kBitGroupBytes,
                kBitGroupBytes);
  }
}

std::string open_packed_bits(const int8_t* data, int64_t size, PackedBits* weight) {
  BitsHeader header;
  if (size < static_cast<int64_t>(sizeof(header))) {
    return "it has " + std::to_string(size) + " bytes, fewer than the header's 64";
  }
  std::memcpy(&header, data, sizeof(header));
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) {
    return "it does not start with the magic bytes QFXB that binary_pack writes";
  }
  if (header.version != kVersion || header.layout != kLayoutK32N32) {
    return "it has layout " + std::to_string(header.layout) + " version " +
           std::to_string(header.version) + ", this build reads layout 1 (K32N32) version 2";
  }
  if (header.n < 0 || header.n > kMaxBinaryN || header.k < 0 || header.k > kMaxBinaryK) {
    return "its header says N=" + std::to_string(header.n) + " K=" + std::to_string(header.k);
  }
  if (size != packed_bits_size(header.n, header.k)) {
    return "it has " + std::to_string(size) + " bytes, N=" + std::to_string(header.n) +
           " K=" + std::to_string(header.k) + " takes " +
           std::to_string(packed_bits_size(header.n, header.k));
  }
  if (const std::string fault = fault_of(header); !fault.empty()) return fault;
  const uint8_t* blocks = reinterpret_cast<const uint8_t*>(data) + sizeof(header);
  *weight = {header.n, header.k, blocks, header.contents};
  return "";
}

}  // namespace qfx::cpu
