// Programs whose words were changed by chance, as a damaged file would hold them: each is refused,
// or runs on the memory of its slots alone, which lie between pages that fault.
#include "cpu/program/program.h"

#include <algorithm>
#include <cstdio>
#include <random>

#include "cpu/gemm/pack.h"
#include "harness.h"

namespace qfx::test {
namespace {

using Sequence = std::vector<int64_t>;

constexpr int kRounds = 1000;  // of each program and place
constexpr int64_t kRows = 3, kColumns = 16, kWords = 5;

Sequence operand(int64_t slot, const Sequence& sizes, Element element = Element::kFloat) {
  Sequence words = {slot, 0, static_cast<int64_t>(element), static_cast<int64_t>(sizes.size())};
  words.insert(words.end(), sizes.begin(), sizes.end());
  int64_t step = 1;
  Sequence strides(sizes.size());
  for (size_t d = sizes.size(); d-- > 0; step *= sizes[d]) strides[d] = step;
  words.insert(words.end(), strides.begin(), strides.end());
  return words;
}

Sequence said(Operation operation, std::initializer_list<Sequence> parts) {
  Sequence words = {static_cast<int64_t>(operation)};
  for (const Sequence& part : parts) words.insert(words.end(), part.begin(), part.end());
  words.insert(words.begin(), static_cast<int64_t>(words.size()));
  return words;
}

// Slots: 0 its own, 1 and 2 floats [3, 16], 3 indices [3], 4 a weight [16, 16], 5 unused, then
// the keys and values of a cache of 2 heads and 16 tokens of 8 features, with their scales.
struct Slots {
  Sequence bytes = {1024, 192, 192, 24, packed_size(16, 16), 64, 256, 128, 256, 128};
  Pages pages[9];
  Sequence addresses = {0};

  explicit Slots(Place place) {
    for (size_t i = 1; i < bytes.size(); ++i) {
      char* data = static_cast<char*>(pages[i - 1].get(bytes[i], 1, place));
      std::fill_n(data, bytes[i], 0);
      addresses.push_back(reinterpret_cast<int64_t>(data));
    }
    const std::vector<int8_t> codes(256, 1);
    pack({codes.data(), 16, 16, 16, 1}, {}, reinterpret_cast<int8_t*>(addresses[4]));
  }
};

std::vector<Sequence> programs() {
  const Sequence a = operand(1, {kRows, kColumns}), b = operand(2, {kRows, kColumns});
  const Sequence places = operand(3, {kRows}, Element::kLong);
  const Sequence cache[] = {operand(6, {1, 2, 1, 8, 16}, Element::kByte), operand(7, {1, 2, 16, 1}),
                            operand(8, {1, 2, 16, 8}, Element::kByte), operand(9, {1, 2, 16, 1})};
  const Sequence k = operand(1, {1, 2, kRows, 8}), v = operand(2, {1, 2, kRows, 8});
  const Sequence quantized = {0, 8, 1, 0, 0, 0}, none = {0, 0};
  const Sequence column = operand(3, {kRows, 1}, Element::kLong);
  const Sequence code = {8, 1, 0, 0, 0}, gate = {1, 0, 0, 0};
  const Sequence stack = operand(4, {1, packed_size(16, 16)}, Element::kByte);
  const Sequence weight = operand(4, {packed_size(16, 16)}, Element::kByte);
  return {
      said(Operation::kCopy, {a, b}),
      said(Operation::kUnary, {{5}, a, b}),
      said(Operation::kBinary, {{2}, a, b, operand(0, {kRows, kColumns})}),
      said(Operation::kMean, {operand(0, {kRows, 1}), b}),
      said(Operation::kSum, {operand(0, {kRows, 1}), b}),
      said(Operation::kWhere, {a, b, b, operand(0, {kRows, kColumns})}),
      said(Operation::kFloatLinear, {a, b, operand(0, {kColumns, kColumns}), {0}}),
      said(Operation::kSoftmax, {a, b}),
      said(Operation::kTopK, {operand(0, {kRows, 2}), operand(1, {kRows, 2}, Element::kLong), b}),
      said(Operation::kGather, {operand(0, {kRows, 1}), b, column}),
      said(Operation::kScatter, {b, column, {0}}),
      said(Operation::kExperts,
           {a, b, column, operand(0, {kRows, 1}), code, gate, stack, {0}, code, stack, {0}}),
      said(Operation::kAttention, {k, v, k, v, {0, 0, 0, 0}}),
      said(Operation::kAttention, {k, v, k, v, {1, 0, 1, 1}, operand(2, {1, 2, kRows, kRows})}),
      said(Operation::kLayerNorm, {a, b, {1}, operand(0, {kColumns}), {0}, {0}}),
      said(Operation::kEmbedding, {a, places, operand(0, {kWords, kColumns})}),
      said(Operation::kLinear,
           {a, quantized, {2}, b, none, weight, operand(0, {kRows, kColumns}), none, weight}),
      said(Operation::kKvWrite, {cache[0], cache[1], cache[2], cache[3], k, v, places}),
      said(Operation::kKvAttention,
           {cache[0], cache[1], cache[2], cache[3], k, v, {0, 0, 9, 0, 0}}),
  };
}

Sequence changed(Sequence words, std::mt19937_64& random) {
  const int64_t edges[] = {
      -1,        int64_t{1} << 20, int64_t{1} << 31, int64_t{1} << 40, int64_t{1} << 62,
      INT64_MAX, INT64_MIN,        INT64_MAX - 63};
  for (int count = static_cast<int>(random() % 4); count >= 0; --count) {
    int64_t& word = words[random() % words.size()];
    const int64_t drawn[] = {static_cast<int64_t>(random() % 70), edges[random() % 8],
                             words[random() % words.size()], word ^ 1, word ^ 2};
    word = drawn[random() % 5];
  }
  return words;
}

// Whether the words were a program.
bool runs(const Slots& slots, const Sequence& words) {
  try {
    cpu::Program(words, slots.bytes, slots.addresses).run({});
    return true;
  } catch (const std::logic_error& error) {
    if (std::strlen(error.what()) < 20) throw Failure("a refusal says too little");
    return false;
  }
}

}  // namespace

void check_program(const Kernels& kernels) {
  set_isa(kernels.isa);
  std::mt19937_64 random(7);
  int64_t ran = 0, refused = 0;
  for (Place place : {Place::kBeforeGuard, Place::kBehindGuard}) {
    for (const Sequence& words : programs()) {
      const Slots slots(place);
      if (!runs(slots, words)) throw Failure("a program is refused");
      for (int round = 0; round < kRounds; ++round) {
        ++(runs(slots, changed(words, random)) ? ran : refused);
      }
    }
  }
  if (ran < 100 || refused < 100) throw Failure("too few programs were run, or refused");
  std::printf("programs on %s ok, %lld ran, %lld were refused\n", kernels.isa,
              static_cast<long long>(ran), static_cast<long long>(refused));
}

}  // namespace qfx::test
