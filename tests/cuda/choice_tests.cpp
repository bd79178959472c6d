// Laws of cuda/sm90/choice.h.
#include <cstdio>
#include <exception>
#include <string>

#include "cuda/sm90/choice.h"

namespace {

using namespace qfx::cuda;
using sm90::Operands;

int failures = 0;

void expect(bool right, const std::string& what) {
  if (right) return;
  std::printf("FAILED: %s\n", what.c_str());
  ++failures;
}

std::string text_of(const Choice& c) { return c.kernel + "/" + std::to_string(c.splits); }

template <typename F>
void expect_error(const std::string& part, const F& f) {
  try {
    f();
  } catch (const std::exception& error) {
    return expect(std::string(error.what()).find(part) != std::string::npos,
                  "'" + part + "' in: " + error.what());
  }
  expect(false, "no error with '" + part + "'");
}

const Gpu kGpu = {"a Hopper GPU", 90, 132};

const std::vector<Measured> kMeasured = {
    {"a Hopper GPU", Operands::kCodes, {1, 16, 4096, 4096}, {"s8_swap16", 2}},
    {"a Hopper GPU", Operands::kCodes, {1, 4096, 4096, 4096}, {"s8_128x256", 1}},
    {"a Hopper GPU", Operands::kCodes, {1, 16, 4096, 128}, {"portable", 1}},
    {"another GPU", Operands::kBits, {1, 16, 4096, 4096}, {"b1_swap16", 1}},
};

const std::vector<Measured> kSteps = {
    {"a Hopper GPU", Operands::kCodes, {1, 16, 4096, 4096}, {"s8_swap16", 1}},
    {"a Hopper GPU", Operands::kCodes, {1, 32, 4096, 4096}, {"s8_swap32", 1}},
};

void only_what_was_measured_runs() {
  const Sizes size = {1, 16, 4096, 4096};
  expect(choose(Operands::kCodes, size, kGpu, measurements()).kernel == "portable" ||
             !measurements().empty(),
         "without rows nothing but the portable kernel");
  expect(choose(Operands::kCodes, size, kGpu, kMeasured) == Choice{"s8_swap16", 2}, "its own row");
  expect(choose(Operands::kCodes, {1, 21, 5000, 4000}, kGpu, kMeasured).kernel == "s8_swap16",
         "the nearest row");
  expect(choose(Operands::kCodes, {1, 900, 4096, 4096}, kGpu, kMeasured).kernel == "s8_128x256",
         "the nearest row by ratio");
  expect(choose(Operands::kCodes, {1, 17, 4096, 4096}, kGpu, kSteps).kernel == "s8_swap32",
         "the next row up, where tiles are full");
  expect(choose(Operands::kCodes, {1, 16, 4096, 100}, kGpu, kMeasured).kernel == "portable",
         "a row for the portable kernel");
  expect(choose(Operands::kBits, size, kGpu, kMeasured).kernel == "portable", "no row for bits");
  const Gpu other = {"no such GPU", 90, 132};
  expect(choose(Operands::kCodes, size, other, kMeasured).kernel == "portable", "no row for a GPU");
  for (const Measured& row : measurements()) {
    expect(row.choice.kernel == "portable" ||
               candidate(row.choice.kernel).config.operands == row.operands,
           std::string("a row of measured.inc for ") + row.choice.kernel);
  }
}

// Every choice can be launched: a kernel for the operands, no more parts of K than it has steps.
void rules_are_total() {
  for (Operands operands : {Operands::kCodes, Operands::kBits}) {
    for (int64_t m = 1; m <= 1 << 20; m = m * 3 + 1) {
      for (int64_t n = 1; n <= 1 << 17; n = n * 7 + 1) {
        for (int64_t k = 1; k <= 1 << 16; k = k * 5 + 2) {
          const Sizes size = {1, m, n, k};
          const Choice c = choose_by_rule(operands, size, kGpu.multiprocessors);
          expect(c.kernel == "portable" || candidate(c.kernel).config.operands == operands,
                 text_of(c));
          expect(c.splits >= 1 && c.splits <= ceil_div(k, sm90::kTileBytes), text_of(c));
        }
      }
    }
  }
}

void rules_take_the_tile_that_fits() {
  struct Row {
    Sizes size;
    const char* kernel;
  };
  constexpr Row kRows[] = {
      {{1, 1, 4096, 4096}, "s8_swap8"},        {{1, 8, 12288, 4096}, "s8_swap8"},
      {{1, 16, 12288, 4096}, "s8_swap16"},     {{1, 32, 4096, 4096}, "s8_swap32"},
      {{1, 64, 4096, 8192}, "s8_swap64"},      {{1, 8192, 8192, 8192}, "s8_128x256x2"},
      {{1, 4096, 4096, 4096}, "s8_128x256x2"}, {{64, 1024, 1024, 128}, "s8_128x256x2"},
      {{1, 128, 8192, 8192}, "s8_128x256"},  // half of each cluster would have no rows
      {{64, 300, 1024, 128}, "s8_128x256"},
  };
  for (const Row& row : kRows) {
    const Choice c = choose_by_rule(Operands::kCodes, row.size, kGpu.multiprocessors);
    expect(c.kernel == row.kernel,
           "M " + std::to_string(row.size.m) + ": " + text_of(c) + " instead of " + row.kernel);
  }
  const Choice few = choose_by_rule(Operands::kCodes, {1, 1, 1024, 16384}, kGpu.multiprocessors);
  expect(few.splits > 4,
         "16 tiles leave 132 multiprocessors idle unless K is split: " + text_of(few));
}

// A block has the shared memory that a kernel wants; wgmma and TMA take its tiles.
void kernels_fit_the_hardware() {
  for (const Candidate& c : candidates()) {
    expect(c.config.shared_bytes() <= 227 << 10, c.name);
    expect(c.config.left % (64 * c.config.warpgroups) == 0 && c.config.left <= 256, c.name);
    expect(c.config.right % 8 == 0 && c.config.right <= 256, c.name);
    expect(c.config.stage_bytes() % 1024 == 0 && c.config.piece_bytes() % 16 == 0, c.name);
    expect(c.config.blocks() * c.config.right / 2 <= 128, c.name);  // registers of sums
    expect(c.config.right % (8 * c.config.cluster) == 0, c.name);   // parts that the swizzle allows
    expect(c.config.cluster <= 8, c.name);
  }
}

// Left tiles are a multiple of a cluster's blocks, and all tiles cover the output.
void clusters_are_whole() {
  for (const Candidate& c : candidates()) {
    for (int64_t m = 1; m < 2000; m += 61) {
      const Sizes size = {3, m, m, 300};
      const TileGrid grid = sm90::grid_of(c.config, size);
      expect(grid.down % static_cast<unsigned>(c.config.cluster) == 0, c.name);
      expect(int64_t{grid.down} * c.config.left >= m && int64_t{grid.across} * c.config.right >= m,
             c.name);
    }
  }
}

void what_cannot_be_addressed_is_portable() {
  for (const Sizes& size : {Sizes{0, 1, 1, 1}, Sizes{1, 0, 5, 5}, Sizes{1, 5, 0, 5},
                            Sizes{1, 5, 5, 0}, Sizes{1, int64_t{1} << 31, 8, 8}}) {
    expect(choose_or_force(Operands::kCodes, size, kGpu, "sm90").kernel == "portable",
           "a size of " + std::to_string(size.m));
  }
}

void forced() {
  const Sizes size = {1, 16, 4096, 4096};
  const auto with = [&](const char* value) {
    return choose_or_force(Operands::kCodes, size, kGpu, value);
  };
  expect(with("portable").kernel == "portable", "portable");
  expect(with("sm90") == choose_by_rule(Operands::kCodes, size, 132), "sm90");
  expect(with("s8_128x128").kernel == "s8_128x128", "by name");
  expect(with("s8_swap8/3") == Choice{"s8_swap8", 3}, "with parts of K");
  expect(choose_or_force(Operands::kCodes, {1, 1, 1, 130}, kGpu, "s8_swap8/9").splits == 2,
         "no more parts than steps");
  expect(with("b1_swap16").kernel == with("").kernel, "a kernel for other operands");
  expect_error("there are portable, sm90", [&] { with("s8_swap9"); });
  expect_error("the parts of K are '17', expected 1 to 16", [&] { with("s8_swap8/17"); });
  expect_error("the parts of K are 'x'", [&] { with("s8_swap8/x"); });
  expect_error("asks for a kernel for compute capability 9.0, but a GPU has 8.9",
               [&] { choose_or_force(Operands::kCodes, size, {"a GPU", 89, 128}, "sm90"); });
}

}  // namespace

int main() {
  only_what_was_measured_runs();
  rules_are_total();
  rules_take_the_tile_that_fits();
  kernels_fit_the_hardware();
  clusters_are_whole();
  what_cannot_be_addressed_is_portable();
  forced();
  if (failures == 0) std::printf("choice ok\n");
  return failures == 0 ? 0 : 1;
}
