// The operands of operators on a cache of keys and values, checked.
#pragma once

#include <optional>
#include <vector>

#include "cpu/attention/cache.h"
#include "cpu/ops/arguments.h"

namespace qfx::cpu {

// The keys or the values of a cache, as operators receive them.
struct GivenPart {
  const char* op;
  CacheKind kind;
  const Tensor &codes, &scale;

  const char* name() const { return kind == CacheKind::kKeys ? "keys" : "values"; }
  const char* scale_name() const { return kind == CacheKind::kKeys ? "key_scale" : "value_scale"; }
  const char* layout() const {
    return kind == CacheKind::kKeys ? "[B, H, L / 16, D * bits / 8, 16]"
                                    : "[B, H, L, D * bits / 8]";
  }
};

// Raises where codes and scales are not those of one cache.
CachePart part_of(const GivenPart& given);

// The size that scores lie below; 0 for any.
float softcap_of(const char* op, double softcap);

// A block table, an operator's argument, checked and copied; it must outlive what get() returns.
class CheckedTable {
 public:
  CheckedTable(const char* op, const std::optional<Tensor>& table, const CachePart& part);

  const BlockTable& get() const { return table_; }

 private:
  std::vector<int32_t> rows_;
  BlockTable table_;
};

}  // namespace qfx::cpu
