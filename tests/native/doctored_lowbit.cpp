// Kernels on codes of 4 and 5 bits with a planted bug: the self-check at load refuses them, with a
// sentence that names the kernel.
#include <algorithm>

#include "cpu/kernels/selfcheck.h"
#include "cpu/kernels/tables/lowbit.h"
#include "harness.h"

namespace qfx::test {
namespace {

// What the planted bug is built around; kernels are plain functions.
const LowbitKernels* real;
int wide;  // bits - 4 of the kernels that a doctored one spoils

void tile_wrong_in_one_element(const LowbitTile& t) {
  real->few[wide][kT0][t.rows - 1](t);
  t.sums[t.rows * kPanel - 1] += 1;
}

void tile_without_the_last_group(const LowbitTile& t) {
  LowbitTile less = t;
  less.last_depth = less.depth;
  --less.groups;
  real->few[wide][kT0][t.rows - 1](less);
}

void unpacks_a_wrong_code(const uint8_t* block, int64_t depth, int64_t group, const uint8_t* zero,
                          int8_t* codes, int32_t* colsum) {
  real->unpack[wide](block, depth, group, zero, codes, colsum);
  codes[depth * kPanel - 1] ^= 16;
}

void unpacks_a_wrong_sum(const uint8_t* block, int64_t depth, int64_t group, const uint8_t* zero,
                         int8_t* codes, int32_t* colsum) {
  real->unpack[wide](block, depth, group, zero, codes, colsum);
  ++colsum[kPanel - 1];
}

void refused(Subject& subject, const Kernels& kernels, const LowbitKernels& spoilt,
             const char* name) {
  subject.begin("wrong codes of few bits");
  Kernels copy = kernels;
  copy.lowbit = &spoilt;
  const std::string fault = fault_of(copy), kernel = name + std::to_string(wide + kFewestBits);
  if (fault.find("kernel " + kernel + "__" + kernels.isa + " computes a wrong") != 0) {
    throw Failure("the self-check says '" + fault + "' of a wrong " + kernel);
  }
}

void check_wrong_unpacking(Subject& subject, const Kernels& kernels) {
  for (UnpackGroupFn bug : {unpacks_a_wrong_code, unpacks_a_wrong_sum}) {
    LowbitKernels spoilt = *real;
    spoilt.unpack[wide] = bug;
    refused(subject, kernels, spoilt, "unpack");
  }
}

void check_wrong_tiles(Subject& subject, const Kernels& kernels, int hint, int rows) {
  for (LowbitTileFn bug : {tile_wrong_in_one_element, tile_without_the_last_group}) {
    LowbitTileFn tiles[kMaxTileRows];
    std::copy_n(real->few[wide][hint], real->rows->few.rows, tiles);
    tiles[rows - 1] = bug;
    LowbitKernels spoilt = *real;
    spoilt.few[wide][hint] = tiles;
    refused(subject, kernels, spoilt, "lowbit");
  }
}

}  // namespace

void check_doctored_lowbit(const Kernels& kernels) {
  Subject subject(std::string("doctored kernels of few bits are refused__") + kernels.isa);
  real = kernels.lowbit;
  const int tallest = real->rows == nullptr ? 0 : real->rows->few.rows;
  for (wide = 0; wide < kBitWidths; ++wide) {
    check_wrong_unpacking(subject, kernels);
    for (int hint = 0; hint < kHints; ++hint) {
      for (int rows = 1; rows <= tallest; ++rows) check_wrong_tiles(subject, kernels, hint, rows);
    }
  }
  subject.passed();
}

}  // namespace qfx::test
