// Kernels with a planted bug: the self-check at load refuses those that compute wrong sums, with a
// sentence that names the kernel, and these tests see them and those that leave their operands.
#include <algorithm>

#include "cpu/kernels/selfcheck.h"
#include "cpu/kernels/tables/rows.h"
#include "harness.h"

namespace qfx::test {
namespace {

// What the planted bug is built around; tiles are plain functions.
const Format* real = nullptr;
int height = 0;

void wrong_in_one_element(const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups,
                          const int8_t* ahead, int32_t* tile, bool accumulate) {
  real->tiles[height - 1](a, lda, b, groups, ahead, tile, accumulate);
  tile[height * kPanel - 1] += 1;
}

void wrong_in_one_element_of_a_pair(const uint8_t* a, int64_t lda, const int8_t* b, int64_t apart,
                                    int64_t groups, int64_t ahead, int32_t* out) {
  real->pairs.tiles[kT0][height - 1](a, lda, b, apart, groups, ahead, out);
  out[2 * height * kPanel - 1] += 1;
}

void takes_the_first_panel_twice(const uint8_t* a, int64_t lda, const int8_t* b, int64_t,
                                 int64_t groups, int64_t ahead, int32_t* out) {
  real->pairs.tiles[kT0][height - 1](a, lda, b, 0, groups, ahead, out);
}

void far_off(const uint8_t*, int64_t, const int8_t*, int64_t, const int8_t*, int32_t* tile, bool) {
  std::fill_n(tile, height * kPanel, INT32_MIN);
}

void forgets_what_was_there(const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups,
                            const int8_t* ahead, int32_t* tile, bool) {
  real->tiles[height - 1](a, lda, b, groups, ahead, tile, false);
}

void reads_a_group_too_many(const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups,
                            const int8_t* ahead, int32_t* tile, bool accumulate) {
  real->tiles[height - 1](a, lda, b, groups, ahead, tile, accumulate);
  (void)*static_cast<const volatile int8_t*>(b + groups * kPanel * kGroup);
}

int32_t constant_off_by_one(const int8_t* q, int64_t k, int64_t padded_k, uint8_t* a) {
  return real->arrange(q, k, padded_k, a) + 1;
}

void strip_that_forgets(int rows, const uint8_t* a, int64_t lda, const int8_t* b, int64_t groups,
                        const int8_t* ahead, int64_t fetches, const int32_t*,
                        const Pending& before) {
  real->strips->rows_pass[0](rows, a, lda, b, groups, ahead, fetches, nullptr, before);
}

void strip_that_leaves_a_line(int rows, const uint8_t* a, int64_t lda, const int8_t* b,
                              int64_t groups, const int8_t* ahead, int64_t fetches,
                              const int32_t* sums, const Pending& before) {
  Pending less = before;
  if (less.then[0].rows > 0) --less.then[0].rows;
  real->strips->rows_pass[0](rows, a, lda, b, groups, ahead, fetches, sums, less);
}

void pair_that_forgets_the_second(int rows, const uint8_t* a, int64_t lda, const int8_t* b,
                                  int64_t apart, int64_t groups, int64_t ahead, int hint,
                                  const Pending& before) {
  Pending less = before;
  less.then[1].rows = 0;
  real->strips->pairs[0](rows, a, lda, b, apart, groups, ahead, hint, less);
}

void without_a_finish(const Pending&) {}

// Kernels whose every format is a copy of one of `original`, to be spoilt.
struct Copy {
  Format format;
  TileFn tiles[kMaxTileRows], prefetching_tiles[kMaxTileRows], few[kHints][kMaxTileRows];
  TileFn narrow_tiles[kMaxTileRows];
  PairFn pairs[kHints][kMaxTileRows];
  Kernels kernels;

  Copy(const Kernels& original, const Format& from) : format(from), kernels(original) {
    std::copy_n(from.tiles, from.tile_rows, tiles);
    std::copy_n(from.prefetching_tiles, from.tile_rows, prefetching_tiles);
    for (int hint = 0; hint < kHints; ++hint) {
      std::copy_n(from.few.tiles[hint], from.few.rows, few[hint]);
      std::copy_n(from.pairs.tiles[hint], from.pairs.rows, pairs[hint]);
      format.few.tiles[hint] = few[hint];
      format.pairs.tiles[hint] = pairs[hint];
    }
    if (from.narrow_tiles != nullptr) {
      std::copy_n(from.narrow_tiles, from.tile_rows, narrow_tiles);
      format.narrow_tiles = narrow_tiles;
    }
    format.tiles = tiles;
    format.prefetching_tiles = prefetching_tiles;
    format.below = nullptr;
    for (int kind = 0; kind < kOperandKinds; ++kind) {
      // The formats of other kinds stay: this one may not be exact for them.
      for (const Format* f = original.formats[kind]; f != nullptr; f = f->below) {
        if (f == &from) kernels.formats[kind] = &format;
      }
    }
  }
};

void refused(Subject& subject, const Copy& copy, int rows, const std::string& what) {
  subject.begin(what);
  const std::string fault = fault_of(copy.kernels);
  const std::string beginning = "kernel " + kernel_name(copy.kernels, copy.format, rows) +
                                " computes a wrong product on this processor (row ";
  if (fault.compare(0, beginning.size(), beginning) != 0) {
    throw Failure("the self-check says '" + fault + "' of " +
                  kernel_name(copy.kernels, copy.format, rows) + " with " + what);
  }
}

void check_refusals_of_few_rows(Subject& subject, const Kernels& kernels, const Format& format) {
  for (int hint = 0; hint < kHints; ++hint) {
    for (height = 1; height <= format.few.rows; ++height) {
      Copy few(kernels, format);
      few.few[hint][height - 1] = wrong_in_one_element;
      refused(subject, few, height, "a wrong tile of few rows");
    }
    for (height = 1; height <= format.pairs.rows; ++height) {
      for (PairFn bug : {wrong_in_one_element_of_a_pair, takes_the_first_panel_twice}) {
        Copy pair(kernels, format);
        pair.pairs[hint][height - 1] = bug;
        refused(subject, pair, height, "a wrong pair of tiles");
      }
    }
  }
}

void check_refusals_of_strips(Subject& subject, const Kernels& kernels, const Format& format) {
  if (format.strips == nullptr) return;
  real = &format;
  for (int bug = 0; bug < 4; ++bug) {
    StripFn strips[kOutputs];
    StripPairFn pairs[kOutputs];
    std::copy_n(format.strips->rows_pass, kOutputs, strips);
    std::copy_n(format.strips->pairs, kOutputs, pairs);
    if (bug < 2) strips[0] = bug == 0 ? strip_that_forgets : strip_that_leaves_a_line;
    if (bug == 2) pairs[0] = pair_that_forgets_the_second;
    Strips spoilt = *format.strips;
    spoilt.rows_pass = strips;
    spoilt.pairs = pairs;
    if (bug == 3) spoilt.finish = without_a_finish;
    Copy copy(kernels, format);
    copy.format.strips = &spoilt;
    subject.begin("a wrong strip");
    const std::string fault = fault_of(copy.kernels);
    if (fault.find("_strip") == std::string::npos) {
      throw Failure("the self-check says '" + fault + "' of strips with bug " +
                    std::to_string(bug));
    }
  }
}

void group_tile_that_forgets(const GroupTile& t) {
  GroupTile less = t;
  if (less.groups > 1) --less.groups;
  less.terms.sums[0] += 1;
  real->groups->tiles[t.terms.row_pair != nullptr][t.rows - 1](less);
}

// A wrong tile of a height in each of the tables.
void check_refusals_of_groups(Subject& subject, const Kernels& kernels, const Format& format) {
  if (format.groups == nullptr) return;
  real = &format;
  for (int zeros : {0, 1}) {
    for (int table = 0; table < 2 + kHints; ++table) {
      GroupTiles spoilt = *format.groups;
      const GroupTileFn*& tiles = table == 0   ? spoilt.tiles[zeros]
                                  : table == 1 ? spoilt.prefetching[zeros]
                                               : spoilt.few[zeros][table - 2];
      const int rows = table < 2 ? format.tile_rows : format.few.rows;
      GroupTileFn copy[kMaxTileRows];
      std::copy_n(tiles, rows, copy);
      copy[rows - 1] = group_tile_that_forgets;
      tiles = copy;
      Copy wrong(kernels, format);
      wrong.format.groups = &spoilt;
      subject.begin("a wrong tile of groups");
      const std::string fault = fault_of(wrong.kernels);
      if (fault.find("_groups__") == std::string::npos) {
        throw Failure("the self-check says '" + fault + "' of a wrong tile of groups");
      }
    }
  }
}

void check_refusals(Subject& subject, const Kernels& kernels, const Format& format) {
  real = &format;
  for (height = 1; height <= format.tile_rows; ++height) {
    for (TileFn bug : {wrong_in_one_element, far_off, forgets_what_was_there}) {
      Copy plain(kernels, format), prefetching(kernels, format);
      plain.tiles[height - 1] = bug;
      prefetching.prefetching_tiles[height - 1] = bug;
      refused(subject, plain, height, "a wrong tile");
      refused(subject, prefetching, height, "a wrong prefetching tile");
    }
    for (TileFn bug : {far_off, forgets_what_was_there}) {
      if (format.narrow_tiles == nullptr) continue;
      Copy narrow(kernels, format);
      narrow.narrow_tiles[height - 1] = bug;
      refused(subject, narrow, height, "a wrong narrow tile");
    }
  }
  Copy offset(kernels, format), constant(kernels, format);
  offset.format.mul_offset ^= 1;
  constant.format.arrange = constant_off_by_one;
  refused(subject, offset, 1, "a wrong offset");
  refused(subject, constant, 1, "a wrong row constant");
}

void wrong_rotation(const float* x, int64_t n, const Transform* transform, float* out,
                    Range* range) {
  kernels_ref().row->rotate(x, n, transform, out, range);
  if (transform->rotation == kLargestRotation) out[n - 1] = -out[n - 1];
}

void wrong_way_back(const float* x, int64_t n, const Transform* transform, float* out) {
  Range range;
  kernels_ref().row->rotate(x, n, transform, out, &range);
}

void wrong_range(const float* x, int64_t n, const Transform* transform, float* out, Range* range) {
  kernels_ref().row->rotate(x, n, transform, out, range);
  range->high -= 1;
}

void check_rotations_refused(Subject& subject, const Kernels& kernels) {
  RowKernels there = *kernels.row, back = there, range = there;
  there.rotate = wrong_rotation;
  back.rotate_back = wrong_way_back;
  range.rotate = wrong_range;
  for (const RowKernels* wrong : {&there, &back, &range}) {
    subject.begin("a wrong rotation");
    Kernels copy = kernels;
    copy.row = wrong;
    const std::string fault = fault_of(copy);
    if (fault.find(std::string("kernel rotate__") + kernels.isa + " computes a wrong") != 0) {
      throw Failure("the self-check says '" + fault + "' of a wrong rotation");
    }
  }
}

// In a process of its own, as the fault ends it.
void test_a_tile_that_reads_on() {
  report_faults();
  Copy copy(kernels_of(Isa::kRef), *real);
  copy.tiles[0] = reads_a_group_too_many;
  check_tiles(copy.kernels);
}

void test_a_wrong_tile() {
  Copy copy(kernels_of(Isa::kRef), *real);
  copy.tiles[0] = wrong_in_one_element;
  try {
    check_tiles(copy.kernels);
  } catch (const Failure&) {
    _Exit(1);
  }
}

void check_that_tests_can_fail(Subject& subject) {
  real = kernels_of(Isa::kRef).formats[0];
  height = 1;
  constexpr int kFails = 1;
  for (auto test : {test_a_tile_that_reads_on, test_a_wrong_tile}) {
    subject.begin("these tests");
    const int status = status_of_child(test);
    subject.same(&status, &kFails, 1);
  }
}

}  // namespace

void check_doctored(const Kernels& kernels) {
  Subject subject(std::string("doctored kernels are refused__") + kernels.isa);
  subject.begin("nothing wrong");
  const std::string fault = fault_of(kernels);
  if (!fault.empty()) throw Failure(fault);
  for (const Format* format : formats_of(kernels)) {
    check_refusals(subject, kernels, *format);
    check_refusals_of_few_rows(subject, kernels, *format);
    check_refusals_of_strips(subject, kernels, *format);
    check_refusals_of_groups(subject, kernels, *format);
  }
  check_rotations_refused(subject, kernels);
  check_that_tests_can_fail(subject);
  subject.passed();
}

}  // namespace qfx::test
