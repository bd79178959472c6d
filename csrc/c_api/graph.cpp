#include "c_api/graph.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace qfx {
namespace {

constexpr std::pair<const char*, int64_t> kTypes[] = {
    {"float32", 4}, {"int64", 8}, {"int32", 4},    {"int8", 1},
    {"uint8", 1},   {"bool", 1},  {"bfloat16", 2}, {"float16", 2}};  // in the order of qfx_dtype

qfx_dtype dtype_of(const Json& told) {
  const std::string& name = told.as_text("the type of an array");
  for (size_t i = 0; i < std::size(kTypes); ++i) {
    if (name == kTypes[i].first) return static_cast<qfx_dtype>(i);
  }
  throw Refused("an array has the unknown type '" + printable(name) + "'");
}

std::vector<int64_t> numbers_of(const Json& told, const std::string& what) {
  std::vector<int64_t> found;
  for (const Json& each : told.as_list(what)) {
    found.push_back(each.integer_in(0, kMostBytes, what));
  }
  return found;
}

const std::vector<Json>& fields_of(const Json& told, size_t count, const std::string& what) {
  const std::vector<Json>& found = told.as_list(what);
  if (found.size() != count) {
    throw Refused(what + " has " + std::to_string(found.size()) + " fields, expected " +
                  std::to_string(count));
  }
  return found;
}

// ["input" or "result", which of `inputs` or `results`].
std::pair<bool, size_t> place_of(const Json& told, size_t inputs, size_t results) {
  const std::vector<Json>& fields = fields_of(told, 2, "the place of an array");
  const std::string& kind = fields[0].as_text("the kind of a place");
  const bool of_input = kind == "input";
  if (!of_input && kind != "result") throw Refused("an array is in '" + printable(kind) + "'");
  const auto count = static_cast<int64_t>(of_input ? inputs : results);
  const int64_t i = fields[1].integer_in(0, count - 1, "the place of an array");
  return {of_input, static_cast<size_t>(i)};
}

int64_t total(std::span<const int64_t> sizes) {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  return count;
}

// Elements of `bytes` bytes at `from`, in the order of `to`.
void copy_strided(const char* from, std::span<const int64_t> sizes,
                  std::span<const int64_t> strides, int64_t bytes, char* to) {
  if (sizes.empty()) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
    return;
  }
  const int64_t each = bytes * total(sizes.subspan(1));
  if (sizes.size() == 1 && strides[0] == 1) {
    std::memcpy(to, from, static_cast<size_t>(bytes * sizes[0]));
    return;
  }
  for (int64_t i = 0; i < sizes[0]; ++i) {
    copy_strided(from + i * strides[0] * bytes, sizes.subspan(1), strides.subspan(1), bytes,
                 to + i * each);
  }
}

}  // namespace

const char* name_of(qfx_dtype dtype) { return kTypes[dtype].first; }

int64_t element_of(qfx_dtype dtype) { return kTypes[dtype].second; }

int64_t product_of(std::span<const int64_t> factors, const std::string& what) {
  int64_t found = 1;
  bool large = false;
  for (const int64_t each : factors) large |= __builtin_mul_overflow(found, each, &found);
  if (std::find(factors.begin(), factors.end(), 0) != factors.end()) return 0;
  if (large || found > kMostBytes) throw Refused(what + " is larger than 2^48");
  return found;
}

int64_t Kind::bytes() const {
  std::vector<int64_t> factors = sizes;
  factors.push_back(element_of(dtype));
  return product_of(factors, "an array");
}

std::vector<Kind> kinds_of(const Json& told) {
  std::vector<Kind> found;
  for (const Json& each : told.as_list("the inputs of a program")) {
    const std::vector<Json>& fields = fields_of(each, 2, "an input");
    found.push_back({dtype_of(fields[0]), numbers_of(fields[1], "a size of an input")});
    found.back().bytes();  // is bounded
  }
  return found;
}

Graph::Graph(const Json& described, const TensorFile& file) {
  described.as_object("a program");
  inputs_ = kinds_of(described.at("inputs"));
  made_ = numbers_of(described.at("made"), "the bytes of a result");
  std::vector<int64_t> expected = {0}, addresses = {0};
  for (const Json& name : described.at("constants").as_list("the constants of a program")) {
    const Tensor& tensor = file.at(name.as_text("a constant"));
    if (tensor.type != "U8" || tensor.bytes == 0) {
      throw Refused("a constant has " + std::to_string(tensor.bytes) + " bytes of type " +
                    tensor.type + ", expected some of type U8");
    }
    expected.push_back(tensor.bytes);
    addresses.push_back(reinterpret_cast<intptr_t>(tensor.data));
  }
  constants_ = addresses.size() - 1;
  for (const int64_t bytes : given_of(described.at("given"))) {
    expected.push_back(bytes);
    addresses.push_back(0);
  }
  const std::vector<int64_t> sizes = numbers_of(described.at("bytes"), "the bytes of a slot");
  expected[0] = sizes.empty() ? -1 : sizes[0];
  if (sizes != expected) {
    throw Refused("a program states other sizes of memory than its tensors have");
  }
  const Tensor& words = file.at(described.at("words").as_text("the instructions of a program"));
  if (words.type != "I64" || words.shape.size() != 1) {
    throw Refused("a program has instructions of type " + words.type + " with " +
                  std::to_string(words.shape.size()) + " axes, expected I64 with 1 axis");
  }
  const auto* first = reinterpret_cast<const int64_t*>(words.data);
  program_ = std::make_unique<cpu::Program>(std::span(first, static_cast<size_t>(words.shape[0])),
                                            sizes, std::move(addresses));
  for (const int64_t slot : program_->written()) {
    if (slot > 0 && slot <= static_cast<int64_t>(constants_)) {
      throw Refused("a program writes to its weights");
    }
  }
  for (const Json& each : described.at("results").as_list("the results of a program")) {
    results_.push_back(result_of(each));
  }
  for (const Given& given : given_) {
    const auto reads = [&](const Result& r) { return !r.of_input && r.place == given.place; };
    if (!given.of_input && std::none_of(results_.begin(), results_.end(), reads)) {
      throw Refused("a program writes to memory that is no result");
    }
  }
  for (const int64_t bytes : made_) memory_.emplace_back(bytes, "for a result of a program");
}

std::vector<int64_t> Graph::given_of(const Json& told) {
  std::set<std::pair<bool, size_t>> seen;
  std::vector<int64_t> bytes;
  for (const Json& each : told.as_list("the memory of a program")) {
    const auto [of_input, place] = place_of(each, inputs_.size(), made_.size());
    if (!seen.emplace(of_input, place).second) throw Refused("two slots have the same memory");
    given_.push_back({of_input, place});
    bytes.push_back(of_input ? inputs_[place].bytes() : made_[place]);
  }
  return bytes;
}

Graph::Result Graph::result_of(const Json& told) const {
  const std::vector<Json>& fields = fields_of(told, 5, "a result");
  const auto [of_input, place] = place_of(fields[0], inputs_.size(), made_.size());
  Result found = {{dtype_of(fields[1]), numbers_of(fields[2], "a size of a result")},
                  of_input,
                  place,
                  numbers_of(fields[3], "a stride of a result"),
                  fields[4].integer_in(0, kMostBytes, "the offset of a result")};
  const std::vector<int64_t>& sizes = found.kind.sizes;
  if (sizes.size() != found.strides.size()) throw Refused("a result has other strides than axes");
  int64_t last = found.offset;
  for (size_t d = 0; d < sizes.size(); ++d) {
    const int64_t step[] = {std::max<int64_t>(sizes[d] - 1, 0), found.strides[d]};
    last = std::min(kMostBytes, last + product_of(step, "a result"));
  }
  // strides of 0 would allow any number of elements, so it is bounded by the memory
  const int64_t bytes = of_input ? inputs_[place].bytes() : made_[place];
  if (found.kind.bytes() > bytes || last + 1 > bytes / element_of(found.kind.dtype)) {
    throw Refused("a program has a result that exceeds its " + std::to_string(bytes) + " bytes");
  }
  return found;
}

bool Graph::writes(size_t count) const {
  return std::any_of(program_->written().begin(), program_->written().end(), [&](int64_t slot) {
    const auto first = static_cast<int64_t>(constants_) + 1;
    if (slot < first) return false;
    const Given& given = given_[static_cast<size_t>(slot - first)];
    return given.of_input && given.place < count;
  });
}

void Graph::run(std::span<const int64_t> inputs) {
  addresses_.assign(inputs.begin(), inputs.end());
  all_addresses_.clear();
  for (const Given& given : given_) {
    all_addresses_.push_back(given.of_input
                                 ? inputs[given.place]
                                 : reinterpret_cast<intptr_t>(memory_[given.place].begin()));
  }
  program_->run(all_addresses_);
}

void Graph::copy(size_t result, std::optional<int64_t> row, char* to) const {
  const Result& from = results_[result];
  const int64_t bytes = element_of(from.kind.dtype);
  const char* begin = from.of_input ? reinterpret_cast<const char*>(addresses_[from.place])
                                    : memory_[from.place].begin();
  begin += from.offset * bytes;
  std::vector<int64_t> sizes = from.kind.sizes, strides = from.strides;
  if (row) {
    const auto at = sizes.end() - 2 - sizes.begin();
    begin += *row * strides[static_cast<size_t>(at)] * bytes;
    sizes.erase(sizes.begin() + at), strides.erase(strides.begin() + at);
  }
  if (product_of(sizes, "a result") > 0) copy_strided(begin, sizes, strides, bytes, to);
}

}  // namespace qfx
