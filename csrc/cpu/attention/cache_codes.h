// The codes of a head of a cache as panels that tiles multiply, unpacked where they are first
// needed.
#pragma once

#include <cstdint>

#include "cpu/attention/cache.h"
#include "cpu/gemm/pack.h"

namespace qfx::cpu {

inline constexpr int64_t kQuadsOfPart = kPart / kQuad, kBlocksOfQuad = kQuad / kTokens;

// A part of a head's tokens: kPart of them. Np: kPart, Ep: E in whole panels.
struct CachePartCodes {
  const uint8_t **k_blocks, **v_blocks;  // [Np / 16], as in CachePanelsArgs
  int8_t *k, *v;             // panels of 32 keys and all features; of 32 features and all values
  int32_t *k_sums, *v_sums;  // [Np], [Np / 32][Ep]
  float *k_scale, *v_scale;  // [Np], NaN where a key or its value is faulty; 0 there
  float *k_minimum, *v_minimum;  // [Np], in 4 bits
};

class CacheCodes {
 public:
  // Room for all parts of a head, or for one at a time.
  CacheCodes(const Kernels& kernels, const CacheAttention& attention, bool all);

  // The parts that follow are of head i, of which none is unpacked.
  void start(int64_t i);

  // Part `part`, of which quads first..end have scales and blocks.
  const CachePartCodes& located(int64_t part, int64_t first, int64_t end);
  // Unpacks such a quad, if it is not yet.
  void unpack(int64_t part, int64_t quad);

  int64_t key_stride() const { return kPanel * padded_k(a_.keys.d); }  // from panel to panel
  int64_t value_stride() const { return kPanel * int64_t{kPart}; }
  int64_t value_width() const { return round_up(a_.values.d, kPanel); }  // Ep

 private:
  CachePartCodes at(char* memory, int64_t* bytes) const;
  struct Found {
    CacheHead keys, values;
    int64_t first;
  };
  Found find(int64_t block) const;
  void locate(int64_t part, int64_t quad);

  const Kernels& kernels_;
  const CacheAttention& a_;
  const bool all_;
  int64_t head_ = 0, held_ = -1;  // the part that the room for one holds
  CachePartCodes here_ = {};
  char* memory_ = nullptr;
  int64_t part_bytes_ = 0;
  enum State : uint8_t { kNothing, kLocated, kUnpacked };
  State* state_ = nullptr;  // [quads]
  int8_t* rows_ = nullptr;
};

}  // namespace qfx::cpu
