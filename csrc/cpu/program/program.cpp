#include "cpu/program/program.h"

#include <string>
#include <utility>

#include "cpu/kernels/dispatch.h"
#include "memory.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kLine = 64;

// Zeros, of which the system makes pages as they are used.
char* allocated(int64_t bytes) {
  constexpr int64_t kMost = int64_t{1} << 43;
  char* found = bytes > kMost ? nullptr : static_cast<char*>(std::calloc(bytes + kLine, 1));
  if (found == nullptr) throw OutOfMemory(std::to_string(bytes), "which a program works in");
  return found;
}

Made instruction_of(Words& words, char* const* slots, const std::optional<Streaming>& how) {
  switch (static_cast<Operation>(words.take())) {
    case Operation::kCopy:
      return copy_of(words);
    case Operation::kUnary:
      return unary_of(words);
    case Operation::kBinary:
      return binary_of(words);
    case Operation::kMean:
      return sum_of(words, true);
    case Operation::kSum:
      return sum_of(words, false);
    case Operation::kEmbedding:
      return embedding_of(words);
    case Operation::kLinear:
      return linear_of(words, slots, how);
    case Operation::kKvWrite:
      return kv_write_of(words);
    case Operation::kKvAttention:
      return kv_attention_of(words);
    case Operation::kWhere:
      return where_of(words);
    case Operation::kFloatLinear:
      return float_linear_of(words);
    case Operation::kSoftmax:
      return softmax_of(words);
    case Operation::kTopK:
      return top_k_of(words);
    case Operation::kGather:
      return gather_of(words);
    case Operation::kScatter:
      return scatter_of(words);
    case Operation::kExperts:
      return experts_of(words, slots);
    case Operation::kAttention:
      return attention_of(words);
    case Operation::kLayerNorm:
      return layer_norm_of(words);
    case Operation::kCount:
      break;
  }
  wrong_program("no such operation");
}

}  // namespace

Program::Program(std::span<const int64_t> words, std::vector<int64_t> bytes,
                 std::vector<int64_t> addresses) {
  expect(!bytes.empty() && bytes.size() == addresses.size(), "as many sizes as slots");
  for (int64_t size : bytes) expect(size >= 0, "a slot of a negative size");
  memory_.reset(allocated(bytes[0]));
  const auto begin = reinterpret_cast<uintptr_t>(memory_.get());
  slots_.push_back(memory_.get() + (kLine - begin % kLine) % kLine);
  for (size_t i = 1; i < addresses.size(); ++i) {
    if (addresses[i] == 0) given_.push_back({i, bytes[i]});
    slots_.push_back(reinterpret_cast<char*>(addresses[i]));
  }
  while (!words.empty()) {
    const int64_t count = words[0];
    expect(count > 0 && count < static_cast<int64_t>(words.size()), "an instruction is cut off");
    Words own(words.subspan(1, static_cast<size_t>(count)), bytes);
    instructions_.push_back(instruction_of(own, slots_.data(), streaming_));
    expect(!own.left(), "an instruction says too much");
    written_.insert(own.written_slots().begin(), own.written_slots().end());
    words = words.subspan(1 + static_cast<size_t>(count));
  }
}

std::vector<Streamed> Program::streamed() const {
  std::vector<Streamed> found;
  for (const Made& each : instructions_) each->streamed(slots_.data(), &found);
  return found;
}

void Program::stream(const std::optional<Streaming>& how) {
  const std::string fault = how ? fault_of(*how) : "";
  if (!fault.empty()) throw std::invalid_argument(fault);
  streaming_ = how;
}

void Program::place(size_t i, int64_t address) {
  if (address == 0 && given_[i].bytes > 0) {
    throw std::invalid_argument("address " + std::to_string(i) + " of a program is null, where " +
                                std::to_string(given_[i].bytes) + " bytes are to be");
  }
  slots_[given_[i].slot] = reinterpret_cast<char*>(address);
}

double Program::work() const {
  double total = 0;
  for (const Made& each : instructions_) total += each->work();
  return total;
}

void Program::run(std::span<const int64_t> given, Poll poll) {
  if (given.size() != given_.size()) {
    throw std::invalid_argument("a program runs on " + std::to_string(given_.size()) +
                                " addresses, got " + std::to_string(given.size()));
  }
  placed_ = false;
  for (size_t i = 0; i < given.size(); ++i) place(i, given[i]);
  placed_ = true;
  run_all(poll);
}

void Program::run(std::span<const int64_t> places, std::span<const int64_t> given, Poll poll) {
  if (!placed_ || places.size() != given.size()) {
    throw std::invalid_argument(
        "a program that ran on all of its " + std::to_string(given_.size()) +
        " addresses runs on new ones at some places, got " + std::to_string(places.size()) +
        " and " + std::to_string(given.size()));
  }
  for (size_t i = 0; i < places.size(); ++i) {
    const auto at = static_cast<size_t>(places[i]);  // what is negative becomes too large
    if (at >= given_.size()) {
      throw std::invalid_argument("place " + std::to_string(places[i]) + " is none of the " +
                                  std::to_string(given_.size()) + " addresses of a program");
    }
    place(at, given[i]);
  }
  run_all(poll);
}

void Program::run_all(Poll poll) const {
  constexpr double kBetween = 1 << 28;  // work between two calls of poll
  const Kernels& kernels = kernels_of(current_isa());
  double since = 0;
  for (const Made& each : instructions_) {
    each->run(kernels, slots_.data());
    since += each->work();
    if (poll != nullptr && since > kBetween) {
      poll();
      since = 0;
    }
  }
}

}  // namespace qfx::cpu
