// Every tile height of every format, prefetching or not and with each hint, fresh and accumulating,
// and those of two panels: (G1).
#include <algorithm>

#include "cpu/gemm/pack.h"
#include "cpu/kernels/selfcheck.h"
#include "harness.h"

namespace qfx::test {
namespace {

constexpr int kColumns = 2 * kPanel;
constexpr const char* kHinted[kHints] = {", by T0", ", by T1", ", by NTA"};

// Codes of kMaxTileRows rows and of two panels of weights, the panels packed, and their products.
struct Problem {
  int64_t k;
  std::vector<std::vector<int8_t>> q;  // [rows][k]
  std::vector<int8_t> block;           // [2][ceil(k / 64) * 16][32][4]
  uint32_t colsum[kColumns] = {};
  int32_t product[kMaxTileRows][kColumns] = {};

  // Row m is line m + shift of code_at, so that with four shifts every row is every line.
  Problem(const Limits& limits, int64_t k, int shift)
      : k(k), q(kMaxTileRows, std::vector<int8_t>(static_cast<size_t>(k))) {
    block.resize(static_cast<size_t>(padded_k(k) * kColumns));
    for (int64_t i = 0; i < k; ++i) {
      for (int m = 0; m < kMaxTileRows; ++m) {
        q[m][i] = code_at(m + shift, i, limits.a_low, limits.a_high);
      }
      for (int n = 0; n < kColumns; ++n) {
        const int8_t w = code_at(n / 4 + n, i, limits.w_low, limits.w_high);
        const int64_t group = n / kPanel * padded_k(k) / kGroup + i / kGroup;
        block[(group * kPanel + n % kPanel) * kGroup + i % kGroup] = w;
        colsum[n] += static_cast<uint32_t>(w);
        for (int m = 0; m < kMaxTileRows; ++m) product[m][n] += q[m][i] * w;
      }
    }
  }
};

// The tiles of a format, each a subject of its own, and the memory that their operands lie in.
class FormatTest {
 public:
  FormatTest(const Kernels& kernels, const Format& format) : format_(format) {
    for (int rows = 1; rows <= format.tile_rows; ++rows) {
      tiles_.emplace_back(kernel_name(kernels, format, rows));
    }
    arrange_ = Subject(std::string(format.name) + "_arrange__" + kernels.isa);
  }

  void run(const Problem& problem) {
    const int64_t depth = round_up(problem.k, format_.k_multiple);
    for (Place place : kPlaces) {
      arrange(problem, depth, place);
      for (int rows = 1; rows <= format_.tile_rows; ++rows) {
        for (bool accumulate : {false, true}) {
          tile(problem, depth, place, rows, accumulate, "", format_.tiles);
          tile(problem, depth, place, rows, accumulate, ", prefetching", format_.prefetching_tiles);
          if (format_.narrow_tiles != nullptr) {
            tile(problem, depth, place, rows, accumulate, ", narrow", format_.narrow_tiles,
                 kPanel / 2);
          }
          for (int hint = 0; hint < kHints && rows <= format_.few.rows; ++hint) {
            tile(problem, depth, place, rows, accumulate, kHinted[hint], format_.few.tiles[hint]);
          }
        }
        for (int hint = 0; hint < kHints && rows <= format_.pairs.rows; ++hint) {
          pair(problem, depth, place, rows, kHinted[hint], format_.pairs.tiles[hint]);
        }
      }
    }
  }

  void passed() const {
    arrange_.passed();
    for (const Subject& tile : tiles_) tile.passed();
  }

 private:
  // Each row between guards; its bytes are judged by the products of the tiles.
  void arrange(const Problem& problem, int64_t depth, Place place) {
    for (int m = 0; m < format_.tile_rows; ++m) {
      arrange_.begin("K=" + std::to_string(problem.k) + ", operands " + name_of(place));
      const int64_t bytes = depth * format_.bytes_per_code;
      uint8_t* row = a_pages_.get<uint8_t>(bytes, place);
      const int8_t* q = q_pages_.copy(problem.q[m], place);
      add_[m] = static_cast<uint32_t>(format_.arrange(q, problem.k, depth, row));
      arranged_[m].assign(row, row + bytes);
    }
  }

  void tile(const Problem& problem, int64_t depth, Place place, int rows, bool accumulate,
            const char* what, const TileFn* tiles, int columns = kPanel) {
    Subject& subject = tiles_[rows - 1];
    subject.begin("K=" + std::to_string(problem.k) + what + (accumulate ? ", accumulating" : "") +
                  ", operands " + name_of(place));
    const int64_t lda = stride_of(problem, depth);
    const uint8_t* a = rows_of(depth, lda, rows, place);
    int8_t* b = b_pages_.get<int8_t>(depth * kPanel, place);
    std::copy_n(problem.block.data(), depth * kPanel, b);
    int32_t* sums = sum_pages_.get<int32_t>(rows * kPanel, place);
    uint32_t start[kMaxTileRows * kPanel] = {};
    for (int i = 0; accumulate && i < rows * kPanel; ++i) {
      start[i] = hash(i) >> 12;
      sums[i] = static_cast<int32_t>(start[i]);
    }
    // What lies ahead need not be there: here it faults.
    tiles[rows - 1](a, lda, b, depth / kGroup, b + depth * kPanel, sums, accumulate);
    int32_t expected[kMaxTileRows * kPanel];
    for (int i = 0; i < rows * kPanel; ++i) {
      const uint32_t product = i % kPanel < columns ? raw(problem, i / kPanel, i % kPanel) : 0;
      expected[i] = static_cast<int32_t>(start[i] + product);
    }
    subject.same(sums, expected, rows * kPanel);
  }

  // The second panel lies a few bytes behind the first, between guards both.
  void pair(const Problem& problem, int64_t depth, Place place, int rows, const char* what,
            const PairFn* pairs) {
    Subject& subject = tiles_[rows - 1];
    subject.begin("K=" + std::to_string(problem.k) + ", a pair" + what + ", operands " +
                  name_of(place));
    const int64_t lda = stride_of(problem, depth), bytes = depth * kPanel;
    const uint8_t* a = rows_of(depth, lda, rows, place);
    const int64_t apart = bytes + problem.k % 5 * 64;
    int8_t* b = b_pages_.get<int8_t>(apart + bytes, place);
    std::copy_n(problem.block.data(), bytes, b);
    std::copy_n(problem.block.data() + padded_k(problem.k) * kPanel, bytes, b + apart);
    int32_t* sums = sum_pages_.get<int32_t>(rows * kColumns, place);
    pairs[rows - 1](a, lda, b, apart, depth / kGroup, 1 << 12, sums);
    int32_t expected[kMaxTileRows * kColumns];
    for (int i = 0; i < rows * kColumns; ++i) {
      const int row = i / kPanel % rows, panel = i / (kPanel * rows);
      expected[i] = static_cast<int32_t>(raw(problem, row, panel * kPanel + i % kPanel));
    }
    subject.same(sums, expected, rows * kColumns);
  }

  int64_t stride_of(const Problem& problem, int64_t depth) const {
    return depth * format_.bytes_per_code + problem.k % 3 * 31;
  }

  const uint8_t* rows_of(int64_t depth, int64_t lda, int rows, Place place) {
    const int64_t bytes = depth * format_.bytes_per_code;
    uint8_t* a = a_pages_.get<uint8_t>((rows - 1) * lda + bytes, place);
    for (int m = 0; m < rows; ++m) std::copy_n(arranged_[m].data(), bytes, a + m * lda);
    return a;
  }

  // What a tile has of these arranged codes: (G1) less the constants of the row.
  uint32_t raw(const Problem& problem, int row, int column) const {
    const uint32_t product = static_cast<uint32_t>(problem.product[row][column]);
    return product - add_[row] + static_cast<uint32_t>(format_.mul_offset) * problem.colsum[column];
  }

  const Format& format_;
  Subject arrange_{""};
  std::vector<Subject> tiles_;
  Pages q_pages_, a_pages_, b_pages_, sum_pages_;
  std::vector<uint8_t> arranged_[kMaxTileRows];
  uint32_t add_[kMaxTileRows];
};

}  // namespace

void check_tiles(const Kernels& kernels) {
  std::vector<const Format*> done;
  for (int kind = 0; kind < kOperandKinds; ++kind) {
    const Limits limits = limits_of(static_cast<Operands>(kind));
    for (const Format* f = kernels.formats[kind]; f != nullptr; f = f->below) {
      if (std::find(done.begin(), done.end(), f) != done.end()) continue;
      done.push_back(f);
      FormatTest test(kernels, *f);
      for (int64_t k : sizes()) {
        for (int shift = 0; shift < 4; ++shift) test.run(Problem(limits, k, shift));
      }
      if (f->release != nullptr) f->release();
      test.passed();
    }
  }
}

}  // namespace qfx::test
