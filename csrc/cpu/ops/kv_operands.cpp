#include "cpu/ops/kv_operands.h"

#include <cmath>

namespace qfx::cpu {
namespace {

// Whether the axes after `first` have no gaps.
bool dense_from(const Tensor& t, int64_t first) {
  if (t.numel() == 0) return true;
  int64_t expected = 1;
  for (int64_t axis = t.dim() - 1; axis >= first; --axis) {
    if (t.size(axis) != 1 && t.stride(axis) != expected) return false;
    expected *= t.size(axis);
  }
  return true;
}

int bits_of(const GivenPart& given) {
  const Tensor& scale = given.scale;
  check_dtype(given.op, given.scale_name(), scale, {ScalarType::Float});
  const bool fits = scale.dim() == 4 && (scale.size(3) == 1 || scale.size(3) == 2);
  STD_TORCH_CHECK(fits, given.op, ": ", given.scale_name(), " has shape ", shape_of(scale),
                  ", expected [B, H, L, 1] for codes of 8 bits or [B, H, L, 2] for 4");
  const int bits = scale.size(3) == 1 ? 8 : 4;
  check_cpu(given.op, given.name(), given.codes);
  const ScalarType expected = bits == 8 ? ScalarType::Char : ScalarType::Byte;
  STD_TORCH_CHECK(given.codes.scalar_type() == expected, given.op, ": ", given.name(),
                  " has dtype ", dtype_name(given.codes.scalar_type()), ", expected ",
                  dtype_name(expected), " for the ", bits, " bits that ", given.scale_name(),
                  " with shape ", shape_of(scale), " says");
  return bits;
}

}  // namespace

CachePart part_of(const GivenPart& given) {
  const Tensor &codes = given.codes, &scale = given.scale;
  const int bits = bits_of(given);
  const bool keys = given.kind == CacheKind::kKeys;
  bool fits = codes.dim() == (keys ? 5 : 4) && codes.size(0) == scale.size(0) &&
              codes.size(1) == scale.size(1) && scale.size(2) % kTokens == 0;
  if (fits && keys) {
    fits = codes.size(4) == kTokens && codes.size(2) * kTokens == scale.size(2);
  } else if (fits) {
    fits = codes.size(2) == scale.size(2);
  }
  STD_TORCH_CHECK(fits, given.op, ": ", given.name(), " has shape ", shape_of(codes), " and ",
                  given.scale_name(), " ", shape_of(scale), ", expected ", given.layout(),
                  " and [B, H, L, 1 or 2], L a multiple of 16: see qfx.ops.kv_cache.kv_empty");
  STD_TORCH_CHECK(dense_from(codes, 2) && dense_from(scale, 2), given.op, ": ", given.name(),
                  " and ", given.scale_name(),
                  " are cut or permuted behind their first two axes, expected whole heads");
  return {static_cast<char*>(codes.mutable_data_ptr()),
          static_cast<char*>(scale.mutable_data_ptr()),
          codes.size(0),
          codes.size(1),
          scale.size(2),
          codes.size(3) * 8 / bits,
          bits,
          {codes.stride(0), codes.stride(1)},
          {scale.stride(0) * 4, scale.stride(1) * 4}};
}

float softcap_of(const char* op, double softcap) {
  const float size = static_cast<float>(softcap);
  STD_TORCH_CHECK(softcap == 0 || (std::isnormal(size) && size > 0), op, ": softcap=", softcap,
                  ", expected a size of scores in float32, or 0 for any");
  return size;
}

CheckedTable::CheckedTable(const char* op, const std::optional<Tensor>& table,
                           const CachePart& part) {
  if (!table.has_value()) return;
  check_dtype(op, "block_table", *table, {ScalarType::Int});
  const int64_t blocks = part.capacity / kTokens;
  STD_TORCH_CHECK(table->dim() == 2 && table->size(0) == part.batch && table->size(1) == blocks, op,
                  ": block_table has shape ", shape_of(*table), ", expected ", part.batch, "x",
                  blocks, ", a sequence for each block of 16 tokens");
  const int32_t* given = static_cast<const int32_t*>(table->const_data_ptr());
  for (int64_t i = 0; i < part.batch * blocks; ++i) {
    const int64_t b = i / blocks, block = i % blocks;
    rows_.push_back(given[b * table->stride(0) + block * table->stride(1)]);
    STD_TORCH_CHECK(rows_[i] >= 0 && rows_[i] < part.batch, op, ": block_table has ", rows_[i],
                    " for block ", block, " of sequence ", b, ", which is outside 0..",
                    part.batch - 1);
  }
  table_ = {rows_.data(), blocks};
}

}  // namespace qfx::cpu
