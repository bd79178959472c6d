// The products of csrc/cuda on the emulator: every tile shape, split or not, at the edges of its
// tiles, with the extremes of codes, against sums in plain C++; and the laws of the plan.
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda/gemm/copy_rows.h"
#include "cuda/gemm/gemm.h"
#include "fibers.h"

namespace {

using namespace qfx::cuda;

int failures = 0;

void expect(bool right, const std::string& what) {
  if (right) return;
  std::printf("FAILED: %s\n", what.c_str());
  ++failures;
}

struct alignas(16) Chunk {
  int32_t of[4];
};

// Rows of bytes, each at a multiple of 16, zero behind `bytes`.
struct Bytes {
  int64_t rows, bytes, pitch;
  std::unique_ptr<Chunk[]> memory;

  Bytes(int64_t rows_, int64_t bytes_, std::mt19937& random)
      : rows(rows_),
        bytes(bytes_),
        pitch(ceil_div(bytes_, 16) * 16),
        memory(new Chunk[rows_ * pitch / 16 + 1]()) {
    const int8_t extremes[] = {-128, 127, -127, 0};
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < bytes; ++i) {
        const uint32_t bits = random();
        row(r)[i] = bits & 1 ? static_cast<int8_t>(bits >> 8) : extremes[bits >> 1 & 3];
      }
    }
  }
  int8_t* row(int64_t r) const { return reinterpret_cast<int8_t*>(memory.get()) + r * pitch; }
  Rows all(int64_t batch_rows) const { return {row(0), pitch, batch_rows * pitch}; }
};

std::vector<int32_t> zeros_of(int64_t rows, std::mt19937& random) {
  std::vector<int32_t> zeros(rows);
  for (int32_t& zero : zeros) zero = static_cast<int32_t>(random() % 256) - 128;
  return zeros;
}

std::string text_of(const Sizes& s, const GemmPlan& plan) {
  return std::to_string(s.batch) + "x" + std::to_string(s.m) + "x" + std::to_string(s.n) + "x" +
         std::to_string(s.k_bytes) + ", shape " + std::to_string(static_cast<int>(plan.shape)) +
         ", splits " + std::to_string(plan.splits);
}

int32_t* values_of(const std::unique_ptr<Chunk[]>& parts, const GemmPlan& plan) {
  return plan.splits == 1 ? nullptr : parts[0].of;
}

// --- the plan ---

void plans_cover_k_once() {
  for (int64_t m : {1, 16, 17, 64, 65, 129, 4096}) {
    for (int64_t n : {1, 64, 100, 4096}) {
      for (int64_t k : {0, 1, 64, 65, 512, 1024, 4096, 65792}) {
        for (int gpu : {1, 14, 132}) {
          const Sizes size = {1, m, n, k};
          const GemmPlan plan = plan_of(size, gpu);
          const int64_t steps = steps_of(size), covered = int64_t{plan.splits} * plan.step_count;
          const std::string text = text_of(size, plan);
          expect(covered >= steps && covered - plan.step_count < std::max<int64_t>(steps, 1),
                 "every part of K has steps, and every step a part: " + text);
          expect(plan.splits == 1 || plan.step_count >= 8, "parts are worth it: " + text);
          expect(plan.splits == 1 || tiles_of(size, plan.shape) * plan.splits <= gpu,
                 "K is split for GPUs with nothing to do only: " + text);
          expect((plan.shape == TileShape::k16x64) == (m <= 16), "few rows, flat tiles: " + text);
        }
      }
    }
  }
  expect(plan_of({1, 4096, 4096, 4096}, 132).shape == TileShape::k128x128, "large tiles");
  expect(plan_of({1, 1, 4096, 4096}, 132) == GemmPlan{TileShape::k16x64, 2, 32}, "a split");
}

// --- products of codes ---

void codes_are_exact(const Sizes& size, TileShape shape, int splits) {
  std::mt19937 random(7);
  const Bytes a(size.batch * size.m, size.k_bytes, random);
  const Bytes w(size.batch * size.n, size.k_bytes, random);
  const std::vector<int32_t> zero = zeros_of(size.batch * size.m, random);
  std::vector<int32_t> colsum(size.batch * size.n);
  for (size_t n = 0; n < colsum.size(); ++n) {
    for (int64_t k = 0; k < size.k_bytes; ++k) colsum[n] += w.row(n)[k];
  }
  GemmPlan plan = {shape, splits, static_cast<int>(ceil_div(steps_of(size), splits))};
  const std::unique_ptr<Chunk[]> parts(new Chunk[part_values(size, plan) / 4 + 1]());
  std::vector<int32_t> got(size.batch * size.m * size.n, 77), again(got);
  const CodeTerms terms = {{zero.data(), 1}, colsum.data(), size.n};
  for (auto* y : {&got, &again}) {
    Output out = {};
    out.data = y->data();
    out.type = OutType::kIntegers;
    multiply_codes(size, a.all(size.m), w.all(size.n), terms, out, plan, values_of(parts, plan),
                   nullptr);
  }
  std::vector<int32_t> expected(got.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    const int64_t row = static_cast<int64_t>(i) / size.n, column = static_cast<int64_t>(i) % size.n;
    const int8_t *p = a.row(row), *q = w.row(row / size.m * size.n + column);
    for (int64_t k = 0; k < size.k_bytes; ++k) expected[i] += (p[k] - zero[row]) * q[k];
  }
  expect(got == expected, "the sums of codes are exact: " + text_of(size, plan));
  expect(got == again, "and the same again: " + text_of(size, plan));
}

void signs_are_exact(const Sizes& size, TileShape shape, int splits) {
  std::mt19937 random(9);
  const int64_t k_bytes = size.k_bytes * 8 - 3;  // bits, in fact
  Bytes p(size.m, size.k_bytes, random), w(size.n, size.k_bytes, random);
  const auto bit = [](const Bytes& bytes, int64_t row, int64_t k) {
    return static_cast<uint8_t>(bytes.row(row)[k / 8]) >> k % 8 & 1;
  };
  const auto count = [&](Bytes& bytes) {
    std::vector<int32_t> set(bytes.rows);
    for (int64_t r = 0; r < bytes.rows; ++r) {
      bytes.row(r)[bytes.bytes - 1] &= 0x1f;  // nothing behind K
      for (int64_t k = 0; k < k_bytes; ++k) set[r] += bit(bytes, r, k);
    }
    return set;
  };
  const std::vector<int32_t> in_p = count(p), in_w = count(w);
  const GemmPlan plan = {shape, splits, static_cast<int>(ceil_div(steps_of(size), splits))};
  const std::unique_ptr<Chunk[]> parts(new Chunk[part_values(size, plan) / 4 + 1]());
  std::vector<int32_t> got(size.m * size.n, 77), expected(got.size());
  Output out = {};
  out.data = got.data();
  out.type = OutType::kIntegers;
  multiply_signs(size, p.all(0), w.all(0),
                 {static_cast<uint32_t>(k_bytes), in_p.data(), in_w.data()}, out, plan,
                 values_of(parts, plan), nullptr);
  for (size_t i = 0; i < expected.size(); ++i) {
    for (int64_t k = 0; k < k_bytes; ++k) {
      const bool same = bit(p, i / size.n, k) == bit(w, i % size.n, k);
      expected[i] += same ? 1 : -1;
    }
  }
  expect(got == expected, "the sums of signs are exact: " + text_of(size, plan));
}

// --- moving codes ---

void codes_are_moved(int64_t batch, int64_t rows, int64_t k) {
  std::mt19937 random(11);
  std::vector<int8_t> in(batch * rows * k);
  for (int8_t& code : in) code = static_cast<int8_t>(random());
  const RowSizes size = {batch, rows, k, ceil_div(k, 16) * 16};
  const std::unique_ptr<Chunk[]> memory(new Chunk[batch * rows * size.pitch / 16 + 1]);
  int8_t* out = reinterpret_cast<int8_t*>(memory.get());
  const auto right = [&](bool turned) {
    for (int64_t i = 0; i < batch * rows * size.pitch; ++i) {
      const int64_t b = i / (rows * size.pitch), r = i / size.pitch % rows, j = i % size.pitch;
      const int64_t from = turned ? (b * k + j) * rows + r : (b * rows + r) * k + j;
      if (out[i] != (j < k ? in[from] : 0)) return false;
    }
    return true;
  };
  const std::string text = std::to_string(rows) + "x" + std::to_string(k);
  pad_codes({in.data(), rows * k, k}, size, out, nullptr);
  expect(right(false), "rows are padded: " + text);
  std::vector<int32_t> sums(batch * rows);
  sum_codes({out, rows * size.pitch, size.pitch}, size, sums.data(), nullptr);
  for (int64_t i = 0; i < batch * rows; ++i) {
    int32_t sum = 0;
    for (int64_t j = 0; j < k; ++j) sum += in[i * k + j];
    expect(sums[i] == sum, "rows are added up: " + text);
  }
  turn_codes({in.data(), rows * k, rows}, size, out, nullptr);
  expect(right(true), "columns become rows: " + text);
}

}  // namespace

int main() {
  plans_cover_k_once();
  for (int64_t m : {1, 15, 16, 17}) codes_are_exact({1, m, 65, 96}, TileShape::k16x64, 1);
  for (int64_t m : {63, 64, 65, 129}) codes_are_exact({1, m, 63, 79}, TileShape::k64x64, 1);
  for (int64_t m : {127, 129}) codes_are_exact({1, m, 131, 161}, TileShape::k128x128, 1);
  codes_are_exact({1, 300, 130, 1}, TileShape::k128x128, 1);  // nine tiles: more than a band
  codes_are_exact({1, 600, 70, 3}, TileShape::k64x64, 1);
  codes_are_exact({3, 5, 70, 700}, TileShape::k16x64, 1);
  codes_are_exact({3, 20, 7, 700}, TileShape::k64x64, 4);
  codes_are_exact({1, 13, 130, 1500}, TileShape::k16x64, 3);
  codes_are_exact({1, 2, 3, 0}, TileShape::k16x64, 1);
  for (TileShape shape : {TileShape::k16x64, TileShape::k64x64, TileShape::k128x128}) {
    signs_are_exact({1, 17, 33, 100}, shape, 1);
  }
  signs_are_exact({1, 70, 5, 1100}, TileShape::k64x64, 3);
  codes_are_moved(1, 65, 63);
  codes_are_moved(3, 5, 130);
  codes_are_moved(2, 64, 16);
  if (failures == 0) std::printf("ok\n");
  return failures != 0;
}
