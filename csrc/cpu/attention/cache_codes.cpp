#include "cpu/attention/cache_codes.h"

#include <algorithm>

#include "cpu/core/scratch.h"
#include "cpu/kernels/tables/attention.h"

namespace qfx::cpu {
namespace {

int64_t parts_of(int64_t length) { return (length + kPart - 1) / kPart; }

}  // namespace

CachePartCodes CacheCodes::at(char* memory, int64_t* bytes) const {
  int64_t taken = 0;
  const auto take = [&]<typename T>(int64_t count, T** part) {
    *part = memory == nullptr ? nullptr : reinterpret_cast<T*>(memory + taken);
    taken += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
  };
  CachePartCodes codes;
  take(kPart / kTokens, &codes.k_blocks);
  take(kPart / kTokens, &codes.v_blocks);
  take(kPart / kPanel * key_stride(), &codes.k);
  take(value_width() / kPanel * value_stride(), &codes.v);
  take(kPart, &codes.k_sums);
  take(kPart / kPanel * value_width(), &codes.v_sums);
  for (float** each : {&codes.k_scale, &codes.v_scale, &codes.k_minimum, &codes.v_minimum}) {
    take(kPart, each);
  }
  *bytes = taken;
  return codes;
}

CacheCodes::CacheCodes(const Kernels& kernels, const CacheAttention& attention, bool all)
    : kernels_(kernels), a_(attention), all_(all) {
  thread_local Scratch scratch;
  at(nullptr, &part_bytes_);
  const int64_t parts = parts_of(a_.length), quads = parts * kQuadsOfPart;
  const int64_t codes = (all ? parts : 1) * part_bytes_, rows = kPanel * value_width();
  memory_ = scratch.get<char>(codes + rows + quads);
  rows_ = reinterpret_cast<int8_t*>(memory_ + codes);
  state_ = reinterpret_cast<State*>(rows_ + rows);
}

void CacheCodes::start(int64_t i) {
  head_ = i;
  held_ = -1;
  std::fill_n(state_, parts_of(a_.length) * kQuadsOfPart, kNothing);
}

const CachePartCodes& CacheCodes::located(int64_t part, int64_t first, int64_t end) {
  State* state = state_ + part * kQuadsOfPart;
  if (held_ != part) {
    int64_t bytes;
    here_ = at(memory_ + (all_ ? part : 0) * part_bytes_, &bytes);
    held_ = part;
    if (!all_) std::fill_n(state, kQuadsOfPart, kNothing);
  }
  for (int64_t quad = first; quad < end; ++quad) {
    if (state[quad] != kNothing) continue;
    locate(part, quad);
    state[quad] = kLocated;
  }
  return here_;
}

// The head's memory that holds a block, and where the block begins there, in tokens.
CacheCodes::Found CacheCodes::find(int64_t block) const {
  const int64_t b = head_ / a_.keys.heads, h = head_ % a_.keys.heads;
  if (a_.table.page > 0) {
    const int64_t page = a_.table.row(b, block / a_.table.page);
    return {a_.keys.head(page, h), a_.values.head(page, h), block % a_.table.page * kTokens};
  }
  const int64_t between = a_.keys.heads * (a_.keys.capacity / kTokens);
  const int64_t first = (block + (a_.table.row(b, block) - b) * between) * kTokens;
  return {a_.keys.head(head_), a_.values.head(head_), first};
}

void CacheCodes::locate(int64_t part, int64_t quad) {
  for (int64_t i = quad * kBlocksOfQuad; i < (quad + 1) * kBlocksOfQuad; ++i) {
    const int64_t block = part * (kPart / kTokens) + i, n = i * kTokens;
    CacheScalesArgs scales = {.keys = nullptr,
                              .values = nullptr,
                              .key_bits = a_.keys.bits,
                              .value_bits = a_.values.bits,
                              .key_scale = here_.k_scale + n,
                              .key_minimum = here_.k_minimum + n,
                              .value_scale = here_.v_scale + n,
                              .value_minimum = here_.v_minimum + n};
    here_.k_blocks[i] = here_.v_blocks[i] = nullptr;
    if (block * kTokens < a_.length) {
      const auto [keys, values, first] = find(block);
      here_.k_blocks[i] = keys.codes + first * a_.keys.bytes_of_token();
      here_.v_blocks[i] = values.codes + first * a_.values.bytes_of_token();
      scales.keys = keys.scale + first * a_.keys.scales_of_token();
      scales.values = values.scale + first * a_.values.scales_of_token();
    }
    kernels_.attention->cache.scales(&scales);
  }
}

void CacheCodes::unpack(int64_t part, int64_t quad) {
  State* state = state_ + part * kQuadsOfPart + quad;
  if (*state == kUnpacked) return;
  *state = kUnpacked;
  const int64_t first = quad * kQuad, block = quad * kBlocksOfQuad;
  CachePanelsArgs args = {.blocks = here_.k_blocks + block,
                          .bits = a_.keys.bits,
                          .features = a_.keys.d,
                          .stride = key_stride(),
                          .out = here_.k + first / kPanel * key_stride(),
                          .sums = here_.k_sums + first,
                          .rows = rows_};
  kernels_.attention->cache.key_panels(&args);
  args.blocks = here_.v_blocks + block;
  args.bits = a_.values.bits;
  args.features = a_.values.d;
  args.stride = value_stride();
  args.out = here_.v + first * kPanel;
  args.sums = here_.v_sums + first / kPanel * value_width();
  kernels_.attention->cache.value_panels(&args);
}

}  // namespace qfx::cpu
