#include "c_api/decoder.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace qfx {
namespace {

std::string text(int64_t number) { return std::to_string(number); }

// A block table in which each sequence has blocks of its own.
std::vector<int32_t> own_blocks(const Kind& table) {
  std::vector<int32_t> found;
  for (int64_t b = 0; b < table.sizes[0]; ++b) {
    found.insert(found.end(), static_cast<size_t>(table.sizes[1]), static_cast<int32_t>(b));
  }
  return found;
}

// Which slots a query sees, in 4 slots - 2 bytes: those from row_of(place) on are of its mask. The
// first half is for places before any slot is used again, the second for later ones, which see the
// last `window` tokens at either end of the ring.
std::vector<uint8_t> visible_of(const LayerKind& kind) {
  const int64_t slots = kind.slots, half = 2 * slots - 1;
  const int64_t window = std::min(kind.window.value_or(slots), slots);
  std::vector<uint8_t> found(static_cast<size_t>(2 * half), 0);
  for (int64_t i = 0; i < half; ++i) {
    const bool seen = i >= slots - window && i < slots;
    found[static_cast<size_t>(i)] = seen;
    found[static_cast<size_t>(half + i)] = seen || i >= 2 * slots - window;
  }
  return found;
}

int64_t row_of(int64_t place, int64_t slots, int64_t length) {
  if (slots == length) return slots - 1 - place;
  return (place < slots ? 0 : 2 * slots - 1) + slots - 1 - place % slots;
}

int64_t address_of(const void* data) { return reinterpret_cast<intptr_t>(data); }

}  // namespace

Decoder::Decoder(const Json& told, const TensorFile& tensors, int64_t max_memory)
    : file_(decoder_file(told, tensors, max_memory)) {
  int64_t bytes = 0;
  for (const std::vector<Kind>& layer : file_.cache) {
    for (const Kind& each : layer) bytes += whole_lines(each.bytes());
  }
  cache_ = Pages(bytes, "for the cache");
  const std::vector<Kind> inputs = file_.first_inputs(1);
  for (size_t i = 0; i < file_.slots.size(); ++i) tables_.push_back(own_blocks(inputs[3 + 2 * i]));
  for (const LayerKind& kind : file_.kinds) visible_.push_back(visible_of(kind));
  const int64_t weights = weight_bytes(tensors);
  for (const auto& [rows, program] : file_.programs) {
    Step step = step_of(rows, *program, tensors);
    check_step(file_, weights, rows, step.graph);
    const int64_t vocabulary = step.graph.results()[0].kind.sizes[2];
    if (!steps_.empty() && vocabulary != vocabulary_) {
      throw Refused("the programs return logits of " + text(vocabulary_) + " and of " +
                    text(vocabulary) + " tokens");
    }
    vocabulary_ = vocabulary;
    steps_.emplace(rows, std::move(step));
  }
  reset();
}

Decoder::Step Decoder::step_of(int64_t rows, const Json& told, const TensorFile& tensors) {
  Step step = {Graph(told, tensors), {}, {}, {}, {}, {}, {}};
  const auto count = static_cast<size_t>(file_.batch * rows);
  step.tokens.resize(count);
  step.positions.resize(count);
  step.last.resize(rows > DecoderFile::kMostRows ? 1 : 0);
  step.slots.resize(file_.slots.size(), std::vector<int64_t>(count));
  for (const LayerKind& kind : file_.kinds) {
    step.masks.emplace_back(count * static_cast<size_t>(kind.slots));
  }
  std::vector<int64_t>& to = step.addresses;
  to = {address_of(step.tokens.data()), address_of(step.positions.data())};
  for (size_t i = 0; i < step.slots.size(); ++i) {
    to.push_back(address_of(step.slots[i].data()));
    to.push_back(address_of(tables_[i].data()));
  }
  if (!step.last.empty()) to.push_back(address_of(step.last.data()));
  for (const std::vector<uint8_t>& mask : step.masks) to.push_back(address_of(mask.data()));
  char* at = cache_.begin();
  for (const std::vector<Kind>& layer : file_.cache) {
    for (const Kind& each : layer) {
      to.push_back(address_of(at));
      at += whole_lines(each.bytes());
    }
  }
  return step;
}

int64_t Decoder::seen() const { return *std::max_element(seen_.begin(), seen_.end()); }

void Decoder::reset() {
  seen_.assign(static_cast<size_t>(file_.batch), 0);
  written_ = seen_;
}

// One step takes all tokens if at most half of it is padding; otherwise the largest step without
// padding is the next.
int64_t Decoder::rows_for(int64_t count) const {
  int64_t largest = 1;
  for (const auto& [rows, _] : steps_) {
    if (rows > file_.length) continue;
    if (count <= rows && rows <= 2 * count) return rows;
    if (rows <= count) largest = rows;
  }
  return largest;
}

void Decoder::check(int64_t count) const {
  if (count < 1) throw std::invalid_argument("count=" + text(count) + ": expected at least 1");
  if (count > file_.length - seen()) {
    throw std::invalid_argument(text(count) + " tokens after " + text(seen()) +
                                " do not fit into a cache of " + text(file_.length));
  }
  check_not_overwritten();
}

void Decoder::check_not_overwritten() const {
  int64_t lost = 0;
  for (size_t b = 0; b < seen_.size(); ++b) lost = std::max(lost, written_[b] - seen_[b]);
  for (const LayerKind& kind : file_.kinds) {
    if (!kind.window || kind.slots >= file_.length) continue;
    if (lost <= std::max<int64_t>(kind.slots - *kind.window + 1, 0)) continue;
    throw std::invalid_argument("a read that failed has written " + text(lost) +
                                " tokens, and layers with a window of " + text(*kind.window) +
                                " hold " + text(kind.slots) + ": reset, and read the text again");
  }
}

void Decoder::read(const int64_t* tokens, const uint8_t* mask, int64_t count, float* logits) {
  check(count);
  const int64_t batch = file_.batch;
  std::vector<int64_t> places(static_cast<size_t>(batch * count)), seen = seen_;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t i = b * count; i < (b + 1) * count; ++i) {
      const bool kept = mask == nullptr || mask[i] != 0;
      places[static_cast<size_t>(i)] = kept ? seen[static_cast<size_t>(b)]++ : -1;
    }
  }
  for (int64_t begin = 0; begin < count;) {
    const int64_t rows = rows_for(count - begin), end = std::min(begin + rows, count);
    Step& step = steps_.at(rows);
    run(step, rows, tokens, places, begin, end, count);
    if (end == count) {
      const int64_t row = rows > DecoderFile::kMostRows ? 0 : end - begin - 1;
      step.graph.copy(0, row, reinterpret_cast<char*>(logits));
    }
    begin = end;
  }
  seen_ = seen;  // after all steps
}

void Decoder::run(Step& step, int64_t rows, const int64_t* tokens, std::span<const int64_t> places,
                  int64_t begin, int64_t end, int64_t count) {
  for (int64_t b = 0; b < file_.batch; ++b) {
    int64_t& written = written_[static_cast<size_t>(b)];
    for (int64_t t = 0; t < rows; ++t) {
      const bool padding = begin + t >= end;
      const int64_t from = b * count + begin + t;
      const int64_t place = padding ? -1 : places[static_cast<size_t>(from)];
      step.tokens[static_cast<size_t>(b * rows + t)] = padding ? 0 : tokens[from];
      written = std::max(written, place + 1);
      fill(step, b * rows + t, place);
    }
  }
  if (!step.last.empty()) step.last[0] = end - begin - 1;
  step.graph.run(step.addresses);
}

// The position, slots and masks of a token of a step: padding (place -1) has no slots, and sees
// what the first token sees.
void Decoder::fill(Step& step, int64_t at, int64_t place) const {
  const int64_t position = std::max<int64_t>(place, 0);
  step.positions[static_cast<size_t>(at)] = position;
  for (size_t i = 0; i < file_.slots.size(); ++i) {
    step.slots[i][static_cast<size_t>(at)] = place < 0 ? -1 : place % file_.slots[i];
  }
  for (size_t i = 0; i < file_.kinds.size(); ++i) {
    const int64_t slots = file_.kinds[i].slots;
    const uint8_t* row = visible_[i].data() + row_of(position, slots, file_.length);
    std::memcpy(step.masks[i].data() + at * slots, row, static_cast<size_t>(slots));
  }
}

}  // namespace qfx
