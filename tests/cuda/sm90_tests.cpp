// The Hopper kernels on the emulator against exact sums: by name, or the parts given as arguments.
#include <torch/headeronly/util/BFloat16.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/core/ptx.cuh"
#include "cuda/sm90/multiply.h"

namespace {

using namespace qfx;
using namespace qfx::cuda;
namespace emulated = qfx::emulated;
using sm90::Operands;

constexpr int32_t kCanary = 0x5ca1ab1e;

// Rows of codes or bits with a pitch of a multiple of 16 bytes; what lies behind K is not zero.
struct Matrices {
  std::vector<int8_t> memory;
  int64_t pitch, rows;

  Matrices(int64_t batch, int64_t rows, int64_t k_bytes, std::mt19937& random)
      : pitch(ceil_div(k_bytes, 16) * 16), rows(rows) {
    memory.resize(static_cast<size_t>(batch * rows * pitch + 16));
    for (int8_t& x : memory) x = static_cast<int8_t>(random());
  }
  const int8_t* begin() const {
    const auto address = reinterpret_cast<uintptr_t>(memory.data());
    return memory.data() + (16 - address % 16) % 16;
  }
  const int8_t* row(int64_t batch, int64_t r) const { return begin() + (batch * rows + r) * pitch; }
  Rows all() const { return {begin(), pitch, rows * pitch}; }
};

std::vector<int32_t> numbers(int64_t count, int32_t low, int32_t high, std::mt19937& random) {
  std::vector<int32_t> values(static_cast<size_t>(count));
  for (int32_t& v : values) v = std::uniform_int_distribution<int32_t>(low, high)(random);
  return values;
}

struct Case {
  Choice choice;
  Operands operands;
  Sizes size;
  unsigned seed;
  int multiprocessors = 3;
};

std::string text_of(const Case& c) {
  return c.choice.kernel + "/" + std::to_string(c.choice.splits) + " batch " +
         std::to_string(c.size.batch) + " M " + std::to_string(c.size.m) + " N " +
         std::to_string(c.size.n) + " bytes of K " + std::to_string(c.size.k_bytes) + " seed " +
         std::to_string(c.seed);
}

// What the operands of a case are, and its exact sums.
struct Operation {
  std::mt19937 random;
  Case c;
  Matrices a, w;
  std::vector<int32_t> row_terms, column_terms, workspace;

  explicit Operation(const Case& c)
      : random(c.seed),
        c(c),
        a(c.size.batch, c.size.m, c.size.k_bytes, random),
        w(c.size.batch, c.size.n, c.size.k_bytes, random),
        row_terms(numbers(c.size.batch * c.size.m, -128, 127, random)),
        column_terms(numbers(c.size.batch * c.size.n, -9999, 9999, random)) {
    workspace.resize(static_cast<size_t>(sm90::part_values(c.size, c.choice)));
  }

  int32_t exact(int64_t b, int64_t m, int64_t n) const {
    const int8_t *x = a.row(b, m), *y = w.row(b, n);
    uint32_t sum = 0;
    for (int64_t k = 0; k < c.size.k_bytes; ++k) {
      const bool codes = c.operands == Operands::kCodes;
      sum += static_cast<uint32_t>(codes ? x[k] * y[k]
                                         : __popc(static_cast<unsigned>(x[k] & y[k] & 0xff)));
    }
    const auto row = static_cast<uint32_t>(row_terms[static_cast<size_t>(b * c.size.m + m)]);
    const uint32_t k = static_cast<uint32_t>(8 * c.size.k_bytes);
    if (c.operands == Operands::kBits) {
      const auto column = static_cast<uint32_t>(column_terms[static_cast<size_t>(n)]);
      return static_cast<int32_t>(k - 2 * (row + column) + 4 * sum);
    }
    const auto column = static_cast<uint32_t>(column_terms[static_cast<size_t>(b * c.size.n + n)]);
    return static_cast<int32_t>(sum - row * column);
  }

  void run(const Output& out) {
    emulated::set_seed(c.seed);
    std::fill(workspace.begin(), workspace.end(), 0);
    int32_t* parts = workspace.empty() ? nullptr : workspace.data();
    if (c.operands == Operands::kCodes) {
      const CodeTerms terms = {{row_terms.data(), 1}, column_terms.data(), c.size.n};
      sm90::multiply_codes(c.size, a.all(), w.all(), terms, out, c.choice, parts, c.multiprocessors,
                           nullptr);
    } else {
      const SignTerms terms = {static_cast<uint32_t>(8 * c.size.k_bytes), row_terms.data(),
                               column_terms.data()};
      sm90::multiply_signs(c.size, a.all(), w.all(), terms, out, c.choice, parts, c.multiprocessors,
                           nullptr);
    }
  }
};

[[noreturn]] void differs(const Case& c, int64_t i, const std::string& found,
                          const std::string& expected) {
  throw std::runtime_error(text_of(c) + ": element " + std::to_string(i) + " is " + found +
                           ", expected " + expected);
}

// Every element, and nothing behind the last.
void check_integers(const Case& c) {
  Operation op(c);
  std::vector<int32_t> out(static_cast<size_t>(c.size.batch * c.size.m * c.size.n + 8), kCanary);
  Output to = {};
  to.data = out.data();
  to.type = OutType::kIntegers;
  op.run(to);
  size_t i = 0;
  for (int64_t b = 0; b < c.size.batch; ++b) {
    for (int64_t m = 0; m < c.size.m; ++m) {
      for (int64_t n = 0; n < c.size.n; ++n, ++i) {
        const int32_t expected = op.exact(b, m, n);
        if (out[i] != expected)
          differs(c, static_cast<int64_t>(i), std::to_string(out[i]), std::to_string(expected));
      }
    }
  }
  for (; i < out.size(); ++i) {
    if (out[i] != kCanary)
      differs(c, static_cast<int64_t>(i), "overwritten behind the output", "untouched");
  }
}

// (E1) in bfloat16 with a bias, bit for bit.
void check_floats(const Case& c) {
  Operation op(c);
  const auto floats = [&](int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& v : values) v = std::uniform_real_distribution<float>(-.02f, .02f)(op.random);
    return values;
  };
  const std::vector<float> row_scale = floats(c.size.batch * c.size.m), bias = floats(c.size.n);
  const std::vector<float> col_scale = floats(c.size.batch * c.size.n);
  std::vector<c10::BFloat16> out(static_cast<size_t>(c.size.batch * c.size.m * c.size.n));
  Output to = {};
  to.data = out.data();
  to.type = OutType::kFloats;
  to.dtype = Dtype::kBFloat16;
  to.activation = Activation::kRelu;
  to.row_scale = {row_scale.data(), 1};
  to.col_scale = col_scale.data();
  to.col_step = c.size.n;
  to.bias = {bias.data(), Dtype::kFloat32};
  op.run(to);
  size_t i = 0;
  for (int64_t b = 0; b < c.size.batch; ++b) {
    for (int64_t m = 0; m < c.size.m; ++m) {
      for (int64_t n = 0; n < c.size.n; ++n, ++i) {
        const float scale = row_scale[static_cast<size_t>(b * c.size.m + m)] *
                            col_scale[static_cast<size_t>(b * c.size.n + n)];
        const float v = static_cast<float>(op.exact(b, m, n)) * scale;
        const float y = v + bias[static_cast<size_t>(n)];
        const c10::BFloat16 expected(y < 0 ? 0 : y);
        if (std::memcmp(&out[i], &expected, 2) != 0)
          differs(c, static_cast<int64_t>(i), std::to_string(static_cast<float>(out[i])),
                  std::to_string(static_cast<float>(expected)));
      }
    }
  }
}

// --- the cases of a kernel ---

// Each M with an N and a K that fit no tile, around the kernel's own tile and more than one of
// them.
void check_sizes(const Candidate& kernel) {
  constexpr int64_t kTokens[] = {1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 300};
  constexpr int64_t kFeatures[] = {1, 7, 65, 130, 71, 33, 257, 24, 129, 64, 259};
  constexpr int64_t kBytes[] = {1, 33, 127, 128, 129, 16, 300, 515, 48, 640, 131};
  for (size_t i = 0; i < std::size(kTokens); ++i) {
    const Sizes size = {1, kTokens[i], kFeatures[i], kBytes[i]};
    check_integers({{kernel.name, 1}, kernel.config.operands, size, static_cast<unsigned>(i)});
  }
}

void check_parts_of_k(const Candidate& kernel) {
  for (int splits : {2, 3, 7}) {
    const Sizes size = {2, 70, 67, 128 * 7 + 5};
    const Case c = {{kernel.name, splits}, kernel.config.operands, size, 7};
    check_integers(c);
    check_floats({c.choice, c.operands, {1, 20, 36, 1000}, 8});
  }
}

void check_batches(const Candidate& kernel) {
  check_integers({{kernel.name, 1}, kernel.config.operands, {5, 19, 66, 257}, 3});
  check_floats({{kernel.name, 1}, kernel.config.operands, {3, 129, 70, 200}, 4});
}

// One block takes all tiles, and its ring of stages turns in the middle of one, in other orders.
void check_turns(const Candidate& kernel) {
  const sm90::Config& c = kernel.config;
  const int64_t left = c.left + 1, right = 2 * std::min(c.right, 64) + c.right + 1;
  for (unsigned seed = 10; seed < 16; ++seed) {
    const int64_t k = 128 * (seed % 2 == 0 ? c.stages / 2 + 2 : c.stages + 2);
    check_integers({{kernel.name, 1},
                    c.operands,
                    {1, c.swap ? right : left, c.swap ? left : right, k},
                    seed,
                    1});
  }
}

// Left tiles of which the last has no neighbour for a cluster, more of them than share a right one
// in L2, in other orders, on as many multiprocessors as leave some idle.
void check_odd_tiles(const Candidate& kernel) {
  const sm90::Config& c = kernel.config;
  for (unsigned seed = 20; seed < 24; ++seed) {
    const int64_t left = c.left * (seed % 2 == 0 ? 2 : 8) + 1, right = c.right + 1;
    const int64_t k = seed % 2 == 0 ? 128 * 5 - 3 : 130, batch = seed % 2 == 0 ? 2 : 1;
    check_integers({{kernel.name, seed % 2 == 0 ? 2 : 1},
                    c.operands,
                    {batch, c.swap ? right : left, c.swap ? left : right, k},
                    seed,
                    static_cast<int>(seed - 15)});
  }
}

struct Part {
  const char* name;
  void (*run)(const Candidate&);
};
constexpr Part kParts[] = {{"sizes", check_sizes},
                           {"parts_of_k", check_parts_of_k},
                           {"batches", check_batches},
                           {"turns", check_turns},
                           {"odd_tiles", check_odd_tiles}};

}  // namespace

int main(int argc, char** argv) {
  const std::string only = argc > 1 ? argv[1] : "";
  try {
    for (const Candidate& kernel : candidates()) {
      if (!only.empty() && only != kernel.name) continue;
      for (const Part& part : kParts) part.run(kernel);
      std::printf("%s ok\n", kernel.name);
    }
  } catch (const std::exception& error) {
    std::printf("FAILED: %s\n", error.what());
    return 1;
  }
  return 0;
}
