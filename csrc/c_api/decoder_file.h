// What a file says of a language model, checked before memory is taken for it; see
// qfx/generate/program_file.py, whose checks and limits these are.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "c_api/graph.h"
#include "c_api/limits.h"

namespace qfx {

inline constexpr int64_t kMostSize = int64_t{1} << 40;

// Layers of one kind hold token n in slot n % slots, and a query sees `window` tokens, or all.
struct LayerKind {
  std::string name;
  std::optional<int64_t> window;
  int64_t slots;
};

struct DecoderFile {
  int64_t length, batch;
  std::vector<LayerKind> kinds;
  std::vector<int64_t> slots;               // the different ones of the kinds
  std::vector<std::vector<Kind>> cache;     // the four arrays of each layer
  std::map<int64_t, const Json*> programs;  // by the tokens of a step

  // The most tokens of a step whose program returns the logits of all of them.
  static constexpr int64_t kMostRows = 16;

  int64_t cache_bytes() const;
  // Of the program of a step of `rows` tokens: those before the cache, and all.
  std::vector<Kind> first_inputs(int64_t rows) const;
  std::vector<Kind> inputs(int64_t rows) const;
};

// Throws Refused for a description that is malformed or needs more memory.
DecoderFile decoder_file(const Json& told, const TensorFile& tensors, int64_t max_memory);

// Throws Refused if the program of a step would do more work than weights and cache account for,
// write to anything but the cache, or return no logits.
void check_step(const DecoderFile& file, int64_t weights, int64_t rows, const Graph& graph);

}  // namespace qfx
