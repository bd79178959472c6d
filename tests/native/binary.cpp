// The kernels of the 1-bit product (H1), alone and as a whole on one thread and on several.
#include <algorithm>

#include "cpu/binary/gemm.h"
#include "harness.h"
#include "threads.h"

namespace qfx::test {
namespace {

constexpr struct {
  int64_t m, n, k;
} kShapes[] = {{1, 1, 1}, {1, 70, 2100}, {2, 32, 31}, {3, 33, 64}, {13, 96, 1000}, {250, 65, 300}};

Isa isa_of(const Kernels& kernels) {
  for (Isa isa : compiled_isas()) {
    if (kernels.isa == std::string(cpu::name_of(isa))) return isa;
  }
  throw Failure(std::string("no instruction set is named ") + kernels.isa);
}

std::vector<uint8_t> random_bits(int64_t bytes, int which) {
  std::vector<uint8_t> bits(static_cast<size_t>(bytes));
  for (size_t i = 0; i < bits.size(); ++i) {
    const uint8_t fills[] = {0, 0xff, 0x55, static_cast<uint8_t>(hash(i * 8 + which))};
    bits[i] = fills[which % 4];
  }
  return bits;
}

// Sums of whole products; tiles hold sum - K.
struct SumSink final : TileSink {
  int64_t n, k;
  int32_t* out;
  SumSink(int64_t n, int64_t k, int32_t* out) : n(n), k(k), out(out) {}
  void load_panel(int64_t, Panel*) const override {}
  void tile(const int32_t* raw, int64_t m, int rows, int64_t p, const Panel&) const override {
    for (int r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < std::min<int64_t>(kPanel, n - p * kPanel); ++i) {
        out[(m + r) * n + p * kPanel + i] = raw[r * kPanel + i] + static_cast<int32_t>(k);
      }
    }
  }
};

class BinaryTest {
 public:
  explicit BinaryTest(const Kernels& kernels)
      : kernels_(binary_kernels_of(isa_of(kernels))),
        signs_(std::string("binary_signs__") + kernels.isa),
        gemm_(std::string("binary_gemm__") + kernels.isa) {
    for (int g = 1; g <= kernels_.tile_groups; ++g) {
      const std::string rows = std::to_string(g * kernels_.row_group);
      tiles_.emplace_back("binary_tile_" + rows + "x32__" + kernels.isa);
    }
  }

  void signs(Numbers kind, int64_t k, Place place) {
    signs_.begin("K=" + std::to_string(k) + ", operands " + name_of(place));
    const std::vector<float> values = numbers(kind, k);
    const int64_t bytes = (k + kBitGroup - 1) / kBitGroup * kBitGroupBytes;
    uint8_t* found = out_.get<uint8_t>(bytes, place);
    std::vector<uint8_t> expected(static_cast<size_t>(bytes));
    const float* x = in_.copy(values, place);
    const int nan[] = {kernels_.signs(x, k, bytes, found),
                       binary_kernels_ref().signs(values.data(), k, bytes, expected.data())};
    signs_.same(found, expected.data(), bytes);
    signs_.same(nan, nan + 1, 1);
  }

  void tiles(int64_t groups, Place place) {
    const int64_t row_bytes = groups * kBitGroupBytes;
    const std::vector<uint8_t> weights = random_bits(groups * kPanel * kBitGroupBytes, 3);
    for (int height = 1; height <= kernels_.tile_groups; ++height) {
      std::vector<uint8_t> bits;
      for (int r = 0; r < height * kernels_.row_group; ++r) {
        const std::vector<uint8_t> row = random_bits(row_bytes, 3 - r % 4);
        bits.insert(bits.end(), row.begin(), row.end());
      }
      for (bool accumulate : {false, true}) {
        tile(groups, place, height, bits, weights, accumulate);
      }
    }
  }

  void gemm(int64_t m, int64_t n, int64_t k) {
    const std::vector<float> x = numbers(Numbers::kPlain, m * k),
                             w = numbers(Numbers::kTiny, n * k);
    std::vector<int8_t> packed(static_cast<size_t>(packed_bits_size(n, k)));
    uint8_t* blocks = reinterpret_cast<uint8_t*>(packed.data()) + kBitsHeader;
    const int64_t groups = (k + kBitGroup - 1) / kBitGroup;
    std::vector<uint8_t> bits(static_cast<size_t>(groups * kBitGroupBytes));
    for (int64_t i = 0; i < n; ++i) {
      binary_kernels_ref().signs(w.data() + i * k, k, groups * kBitGroupBytes, bits.data());
      uint8_t* block = blocks + i / kPanel * groups * kPanel * kBitGroupBytes;
      place_column(bits.data(), groups, i % kPanel, block);
    }
    finish_packed_bits(n, k, packed.data());
    std::vector<int32_t> expected;
    for (int64_t i = 0; i < m * n; ++i) {
      int32_t sum = 0;
      for (int64_t j = 0; j < k; ++j) {
        sum += (x[i / n * k + j] >= 0) == (w[i % n * k + j] >= 0) ? 1 : -1;
      }
      expected.push_back(sum);
    }
    for (int64_t threads : {1, 3}) gemm_one(m, n, k, threads, x, packed, expected);
    cpu::test_threads = 1;
  }

  void passed() const {
    signs_.passed();
    for (const Subject& tile : tiles_) tile.passed();
    gemm_.passed();
  }

 private:
  // Row groups as tiles read them: `stride` apart, each with the slack behind it.
  const uint8_t* arranged(int64_t groups, Place place, int height, const std::vector<uint8_t>& bits,
                          int64_t stride) {
    const int64_t group_bytes = kernels_.row_group * groups * kBitGroupBytes;
    uint8_t* a = a_.get<uint8_t>(height * stride, place);
    for (int g = 0; g < height; ++g) {
      const auto first = bits.begin() + g * group_bytes;
      kernels_.arrange(in_.copy(std::vector<uint8_t>(first, first + group_bytes), place), groups,
                       a + g * stride);
    }
    return a;
  }

  void tile(int64_t groups, Place place, int height, const std::vector<uint8_t>& bits,
            const std::vector<uint8_t>& weights, bool accumulate) {
    Subject& subject = tiles_[height - 1];
    subject.begin(std::to_string(groups) + " groups, operands " + name_of(place));
    const int64_t stride = groups * kernels_.bytes_per_group + kSlack;
    const uint8_t* a = arranged(groups, place, height, bits, stride);
    const uint8_t* b = b_.copy(weights, place);
    if (kernels_.spread != nullptr) {
      const int64_t bytes = groups * kPanel * kernels_.spread_bytes + kSlack;
      uint8_t* spread = spread_.get<uint8_t>(bytes, place);
      kernels_.spread(b, groups, spread);
      b = spread;
    }
    const int rows = height * kernels_.row_group;
    int32_t* found = out_.get<int32_t>(rows * kPanel, place);
    for (int i = 0; i < rows * kPanel; ++i) found[i] = i * 1000;
    std::vector<int32_t> expected(static_cast<size_t>(rows * kPanel));
    for (int r = 0; r < rows; ++r) {
      for (int n = 0; n < kPanel; ++n) {
        int32_t& sum = expected[r * kPanel + n] = accumulate ? (r * kPanel + n) * 1000 : 0;
        for (int64_t i = 0; i < groups * kBitGroupBytes; ++i) {
          const int64_t at = (i / kBitGroupBytes * kPanel + n) * kBitGroupBytes;
          const unsigned differ = static_cast<unsigned>(bits[r * groups * kBitGroupBytes + i] ^
                                                        weights[at + i % kBitGroupBytes]);
          sum -= 2 * __builtin_popcount(differ);
        }
      }
    }
    kernels_.tiles[height - 1](a, stride, b, groups, found, accumulate);
    subject.same(found, expected.data(), rows * kPanel);
  }

  void gemm_one(int64_t m, int64_t n, int64_t k, int64_t threads, const std::vector<float>& x,
                const std::vector<int8_t>& packed, const std::vector<int32_t>& expected) {
    cpu::test_threads = threads;
    gemm_.begin("M=" + std::to_string(m) + " N=" + std::to_string(n) + " K=" + std::to_string(k) +
                ", " + std::to_string(threads) + " threads");
    const int8_t* data = b_.copy(packed, Place::kBeforeGuard);
    PackedBits w = {};
    const std::string fault = open_packed_bits(data, static_cast<int64_t>(packed.size()), &w);
    if (!fault.empty()) throw Failure("packed bits are refused: " + fault);
    const FloatMatrix matrix = {in_.copy(x, Place::kBeforeGuard), Dtype::kFloat32, m, k};
    std::vector<float> row_scale(static_cast<size_t>(m));
    const BitRows rows = signs_of(kernels_, w, matrix, row_scale.data());
    int32_t* found = out_.get<int32_t>(m * n, Place::kBeforeGuard);
    binary_gemm(kernels_, rows, w, SumSink(n, k, found));
    gemm_.same(found, expected.data(), m * n);
  }

  const BinaryKernels& kernels_;
  Subject signs_, gemm_;
  std::vector<Subject> tiles_;
  Pages in_, a_, b_, spread_, out_;
};

}  // namespace

void check_binary(const Kernels& kernels) {
  BinaryTest test(kernels);
  for (Place place : kPlaces) {
    for (Numbers kind : kNumbers) {
      for (int64_t k : sizes()) test.signs(kind, k, place);
    }
    for (int64_t groups = 0; groups <= 60; groups += groups < 20 ? 1 : 8) test.tiles(groups, place);
  }
  for (const auto& [m, n, k] : kShapes) test.gemm(m, n, k);
  test.passed();
}

}  // namespace qfx::test
