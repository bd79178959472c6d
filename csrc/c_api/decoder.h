// A language model from a file of programs, with its cache; see qfx/generate/decoder.py, which
// computes the same bits.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "c_api/decoder_file.h"
#include "c_api/graph.h"

namespace qfx {

class Decoder {
 public:
  // The tensors outlive it. Throws Refused.
  Decoder(const Json& told, const TensorFile& tensors, int64_t max_memory);

  int64_t batch() const { return file_.batch; }
  int64_t length() const { return file_.length; }
  int64_t vocabulary() const { return vocabulary_; }
  // The tokens of the longest sequence, without padding.
  int64_t seen() const;

  void reset();

  // tokens: [batch, count]. mask: the same shape, 0 for padding, or null. logits: [batch,
  // vocabulary]. Throws std::invalid_argument if tokens do not fit, and what a program throws; then
  // none of the tokens counts as read.
  void read(const int64_t* tokens, const uint8_t* mask, int64_t count, float* logits);

 private:
  // Inputs of a step, but for the cache: those of programs for `rows` tokens.
  struct Step {
    Graph graph;
    std::vector<int64_t> tokens, positions, last;  // [batch, rows], [batch, rows], [1] or nothing
    std::vector<std::vector<int64_t>> slots;       // [batch, rows] for each number of slots
    std::vector<std::vector<uint8_t>> masks;       // [batch, rows, slots] for each kind
    std::vector<int64_t> addresses;                // of all inputs
  };

  Step step_of(int64_t rows, const Json& told, const TensorFile& tensors);
  int64_t rows_for(int64_t count) const;
  void check(int64_t count) const;
  void check_not_overwritten() const;
  // Runs tokens begin.. of each sequence, of which there are `count` in a sequence.
  void run(Step& step, int64_t rows, const int64_t* tokens, std::span<const int64_t> places,
           int64_t begin, int64_t end, int64_t count);
  void fill(Step& step, int64_t at, int64_t place) const;

  DecoderFile file_;
  int64_t vocabulary_ = 0;
  Pages cache_;
  std::vector<std::vector<int32_t>> tables_;   // the block table for each number of slots
  std::vector<std::vector<uint8_t>> visible_;  // for each kind: parts of it are rows of masks
  std::map<int64_t, Step> steps_;              // by their tokens
  std::vector<int64_t> seen_, written_;        // of each sequence; written: by failed reads as well
};

}  // namespace qfx
