#include "c_api/decoder_file.h"

#include <algorithm>

namespace qfx {
namespace {

constexpr int64_t kTokens = 16;        // of a block of keys
constexpr int64_t kLargestStep = 128;  // tokens that one step writes before it reads
constexpr int64_t kRows[] = {1, 4, 16, kLargestStep};

std::string text(int64_t number) { return std::to_string(number); }

int64_t blocks_of(int64_t slots) { return (slots + kTokens - 1) / kTokens; }

int64_t ring_slots(int64_t window) { return blocks_of(window + kLargestStep + kTokens) * kTokens; }

int64_t size_of(const Json& told, const char* name) {
  return told.at(name).integer_in(1, kMostSize, name);
}

std::vector<LayerKind> kinds_of_layers(const Json& told, int64_t length) {
  std::vector<LayerKind> found;
  for (const Json& each : told.at("windows").as_list("windows")) {
    if (each.as_list("a window").size() != 2) throw Refused("a window is no name and number");
    LayerKind kind = {each.items[0].as_text("the kind of a layer"), {}, length};
    if (each.items[1].kind != Json::Kind::kNull) {
      kind.window = each.items[1].integer_in(1, kMostSize, "window");
      kind.slots = std::min(length, ring_slots(*kind.window));
    }
    for (const LayerKind& other : found) {
      if (other.name == kind.name) throw Refused("two windows are of the same kind of layers");
    }
    found.push_back(std::move(kind));
  }
  return found;
}

// The two arrays of keys, or of values, of a layer; see kv_shapes in qfx/ops/kv_cache.py.
struct Half {
  qfx_dtype dtype;
  int64_t bytes, scales;  // of each token and head

  Half(int64_t features, int64_t bits) {
    if (bits == 4 && features % 2 != 0) {
      throw Refused("a cache of 4 bits with " + text(features) +
                    " features: two share a byte, so their number is even");
    }
    dtype = bits == 8 ? QFX_INT8 : QFX_UINT8;
    bytes = bits == 8 ? features : features / 2;
    scales = bits == 8 ? 1 : 2;
  }
};

std::vector<std::vector<Kind>> cache_of(const Json& told, const DecoderFile& file) {
  const std::vector<Json>& bits = told.at("bits").as_list("bits");
  if (bits.size() != 2) throw Refused("bits: expected two numbers, each 4 or 8");
  for (const Json& each : bits) {
    const int64_t number = each.integer_in(4, 8, "bits");
    if (number != 4 && number != 8) throw Refused("bits: expected two numbers, each 4 or 8");
  }
  const std::vector<Json>& layers = told.at("layers").as_list("layers");
  const std::vector<Json>& shapes = told.at("shapes").as_list("shapes");
  if (shapes.size() != layers.size()) {
    throw Refused("the file describes " + text(static_cast<int64_t>(shapes.size())) +
                  " shapes of caches and " + text(static_cast<int64_t>(layers.size())) +
                  " layers, expected one shape for each layer");
  }
  std::vector<std::vector<Kind>> found;
  for (size_t i = 0; i < layers.size(); ++i) {
    const std::string& name = layers[i].as_text("the kind of a layer");
    const auto kind = std::find_if(file.kinds.begin(), file.kinds.end(),
                                   [&](const LayerKind& each) { return each.name == name; });
    if (kind == file.kinds.end()) {
      throw Refused("a layer is of the kind '" + printable(name) +
                    "', and the file has no window for this kind");
    }
    if (shapes[i].as_list("a shape").size() != 2) throw Refused("a shape is no heads and features");
    const int64_t heads = shapes[i].items[0].integer_in(1, kMostSize, "heads");
    const int64_t features = shapes[i].items[1].integer_in(1, kMostSize, "features");
    const Half keys(features, bits[0].integer), values(features, bits[1].integer);
    const int64_t blocks = blocks_of(kind->slots), capacity = blocks * kTokens;
    found.push_back({{keys.dtype, {file.batch, heads, blocks, keys.bytes, kTokens}},
                     {QFX_FLOAT32, {file.batch, heads, capacity, keys.scales}},
                     {values.dtype, {file.batch, heads, capacity, values.bytes}},
                     {QFX_FLOAT32, {file.batch, heads, capacity, values.scales}}});
  }
  return found;
}

std::map<int64_t, const Json*> programs_of(const Json& told) {
  const Json& programs = told.at("programs").as_object("programs");
  std::map<int64_t, const Json*> found;
  for (size_t i = 0; i < programs.items.size(); ++i) {
    const auto rows = std::find_if(std::begin(kRows), std::end(kRows),
                                   [&](int64_t each) { return text(each) == programs.names[i]; });
    if (rows == std::end(kRows)) {
      throw Refused("the file has a program of '" + printable(programs.names[i]) +
                    "' tokens, expected one of 1, 4, 16, 128");
    }
    found[*rows] = &programs.items[i].as_object("a program");
  }
  if (!found.contains(1)) {
    throw Refused("the file has no program of one token, which every decoder needs");
  }
  return found;
}

// Of masks, tables and programs. While a mask is computed in Python, the rows of a table and the
// mask exist: the same file is to need the same memory here.
int64_t working_bytes(const DecoderFile& file) {
  constexpr int64_t kTables = 24;  // bytes for each token of a sequence: its number and slots
  std::vector<int64_t> parts;
  const int64_t rows = file.programs.rbegin()->first;
  const auto tables = static_cast<int64_t>(1 + file.slots.size());
  for (const LayerKind& kind : file.kinds) {
    const int64_t masks[] = {2 * rows, file.batch, kind.slots};
    parts.push_back(product_of(masks, "a mask"));
    parts.push_back(4 * kind.slots);
  }
  const int64_t of_tokens[] = {kTables, file.length, tables};
  parts.push_back(product_of(of_tokens, "a table of tokens"));
  for (const auto& [_, program] : file.programs) {
    const std::vector<Json>& bytes = program->at("bytes").as_list("the bytes of a program");
    if (bytes.empty()) throw Refused("a program has no memory");
    parts.push_back(bytes[0].integer_in(0, kMostSize, "a number of bytes of memory"));
    for (const Json& each : program->at("made").as_list("the results of a program")) {
      parts.push_back(each.integer_in(0, kMostSize, "a number of bytes of memory"));
    }
  }
  return sum_of(parts, "working memory");
}

}  // namespace

int64_t DecoderFile::cache_bytes() const {
  std::vector<int64_t> found;
  for (const std::vector<Kind>& layer : cache) {
    for (const Kind& each : layer) found.push_back(each.bytes());
  }
  return sum_of(found, "the cache");
}

std::vector<Kind> DecoderFile::first_inputs(int64_t rows) const {
  const Kind tokens = {QFX_INT64, {batch, rows}};
  std::vector<Kind> found = {tokens, tokens};
  for (const int64_t size : slots) {
    found.push_back(tokens);
    found.push_back({QFX_INT32, {batch, blocks_of(size)}});
  }
  if (rows > kMostRows) found.push_back({QFX_INT64, {1}});
  for (const LayerKind& kind : kinds) found.push_back({QFX_BOOL, {batch, 1, rows, kind.slots}});
  return found;
}

std::vector<Kind> DecoderFile::inputs(int64_t rows) const {
  std::vector<Kind> found = first_inputs(rows);
  for (const std::vector<Kind>& layer : cache)
    found.insert(found.end(), layer.begin(), layer.end());
  return found;
}

DecoderFile decoder_file(const Json& told, const TensorFile& tensors, int64_t max_memory) {
  DecoderFile file = {};
  file.length = size_of(told, "length");
  file.batch = size_of(told, "batch");
  file.kinds = kinds_of_layers(told, file.length);
  for (const LayerKind& kind : file.kinds) {
    if (std::find(file.slots.begin(), file.slots.end(), kind.slots) == file.slots.end()) {
      file.slots.push_back(kind.slots);
    }
  }
  file.cache = cache_of(told, file);
  file.programs = programs_of(told);
  for (const auto& [rows, program] : file.programs) {
    if (kinds_of(program->at("inputs")) != file.inputs(rows)) {
      throw Refused("the program of " + text(rows) +
                    " tokens has inputs that do not fit the cache and the batch size " +
                    text(file.batch) + " of the file");
    }
  }
  check_memory(weight_bytes(tensors), {file.cache_bytes(), "cache"}, working_bytes(file),
               max_memory);
  return file;
}

void check_step(const DecoderFile& file, int64_t weights, int64_t rows, const Graph& graph) {
  const std::string name = "the program of " + text(rows) + " tokens";
  const int64_t expected = rows > DecoderFile::kMostRows ? 1 : rows;
  const bool one = graph.results().size() == 1;
  const Kind logits = one ? graph.results()[0].kind : Kind{};
  const bool fits = one && logits.dtype == QFX_FLOAT32 && logits.sizes.size() == 3 &&
                    logits.sizes[0] == file.batch && logits.sizes[1] == expected;
  if (!fits) {
    throw Refused(name + " does not return float32 logits [" + text(file.batch) + ", " +
                  text(expected) + ", vocabulary]");
  }
  if (graph.writes(file.first_inputs(rows).size())) {
    throw Refused(name +
                  " writes to its tokens, positions or masks, and may write only to the "
                  "cache");
  }
  check_work("a step of " + text(rows) + " tokens", graph.work(), rows * file.batch, weights, rows,
             file.cache_bytes());
}

}  // namespace qfx
