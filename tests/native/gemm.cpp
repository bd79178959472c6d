// Whole products on one thread and on several: packing, arranging, the driver and both sinks.
#include "cpu/gemm/pack_floats.h"
#include "cpu/gemm/product.h"
#include "cpu/gemm/weight.h"
#include "cpu/kernels/selfcheck.h"
#include "harness.h"
#include "threads.h"

namespace qfx::test {
namespace {

constexpr int64_t kThreads[] = {1, 2, 5};
constexpr struct {
  int64_t m, n, k;
} kShapes[] = {{0, 33, 64},   {1, 1, 1},     {1, 70, 1500}, {2, 32, 7},  {3, 100, 100},
               {5, 64, 1030}, {13, 96, 513}, {37, 70, 300}, {25, 33, 0}, {241, 40, 129},
               {300, 33, 64}, {7, 257, 700}, {140, 5, 520}};

constexpr struct {
  int64_t m, n, k, threads;
} kMoreThreadsThanPanels[] = {{1, 70, 4097, 96},
                              {3, 33, 1500, 5},
                              {13, 64, 2112, 16},
                              {64, 40, 1090, 13},
                              {65, 40, 1090, 13}};

constexpr CodeSpec kSpecs[] = {
    {8, true, false}, {8, false, false}, {8, false, true}, {7, true, false}};

std::string text_of(int64_t m, int64_t n, int64_t k) {
  return "M=" + std::to_string(m) + " N=" + std::to_string(n) + " K=" + std::to_string(k) + ", " +
         std::to_string(cpu::test_threads) + " threads";
}

// Codes, their zero points and (G1).
struct Product {
  int64_t m, n, k;
  std::vector<int8_t> q, w;  // q[m][k], w[n][k]
  std::vector<int32_t> zero_points, sums;

  Product(const Limits& limits, int64_t m, int64_t n, int64_t k) : m(m), n(n), k(k) {
    for (int64_t i = 0; i < m * k; ++i) {
      q.push_back(code_at(i / k * 3 + i / 7 % 4, i % k, limits.a_low, limits.a_high));
    }
    for (int64_t i = 0; i < n * k; ++i) {
      w.push_back(code_at(i / k, i % k, limits.w_low, limits.w_high));
    }
    for (int64_t i = 0; i < m; ++i) {
      zero_points.push_back(static_cast<int32_t>(hash(i) % 256) - 128);
    }
    for (int64_t i = 0; i < m * n; ++i) {
      const int64_t row = i / n, column = i % n;
      int32_t sum = 0;
      for (int64_t j = 0; j < k; ++j)
        sum += (q[row * k + j] - zero_points[row]) * w[column * k + j];
      sums.push_back(sum);
    }
  }
};

class GemmTest {
 public:
  explicit GemmTest(const Kernels& kernels)
      : kernels_(kernels),
        ref_(kernels_of(Isa::kRef)),
        sums_(std::string("gemm__") + kernels.isa),
        floats_(std::string("linear__") + kernels.isa),
        packing_(std::string("pack_floats__") + kernels.isa) {}

  // Exact sums of codes; the weight packed from rows or, column by column, from its transpose.
  void sums(const Product& p) {
    const std::vector<int8_t> transposed = transpose(p);
    for (int64_t threads : kThreads) {
      cpu::test_threads = threads;
      sums_of(p, p.w, p.k, 1, Place::kBeforeGuard);
      sums_of(p, transposed, 1, p.n, Place::kBehindGuard);
    }
  }

  // Floats in, floats out: the same bits as the reference on one thread.
  void linear(int64_t m, int64_t n, int64_t k, Dtype dtype, const CodeSpec& spec) {
    const std::vector<uint8_t> x = floats(m * k, dtype), w = floats(n * k, dtype);
    const StridedFloats weight = {w_.copy(w, Place::kBeforeGuard), dtype, n, k, k, 1};
    cpu::test_threads = 1;
    const std::vector<float> expected = linear_of(ref_, x, m, weight, spec);
    for (int64_t threads : kThreads) {
      cpu::test_threads = threads;
      const std::vector<float> found = linear_of(kernels_, x, m, weight, spec);
      floats_.same(found.data(), expected.data(), m * n);
    }
  }

  // More threads than panels: the parts of K that they take add up to the same sums.
  void parts_of_k(int64_t m, int64_t n, int64_t k, int64_t threads) {
    const WithTuning set(kernels_, {.serial_steps = 0});
    const Product p(limits_of(Operands::kWide), m, n, k);
    cpu::test_threads = threads;
    sums_of(p, p.w, p.k, 1, Place::kBehindGuard);
    several(p, threads);
  }

  // What is worth threads wakes them once, and what is not never does.
  void forks() {
    const std::vector<uint8_t> x = floats(90 * 300, Dtype::kFloat32);
    const StridedFloats weight = {x.data(), Dtype::kFloat32, 70, 300, 300, 1};
    cpu::test_threads = 1;
    PackMemory memory;
    const PackedWeight packed = pack_floats(kernels_, weight, {8, true, false}, memory);
    cpu::test_threads = 5;
    for (int64_t serial : {int64_t{0}, int64_t{1} << 40}) {
      const WithTuning set(kernels_, {.serial_steps = serial});
      floats_.begin("team for a product of which " + std::to_string(serial) + " steps are nothing");
      std::vector<float> scales(90), out(90 * 70);
      const int64_t before = cpu::test_forks, expected = serial == 0;
      const FloatRows from(kernels_, packed, {x.data(), Dtype::kFloat32, 90, 300}, {8, true, false},
                           nullptr, scales.data());
      const FloatOutput to = {nullptr, Activation::kNone, Dtype::kFloat32,
                              reinterpret_cast<char*>(out.data())};
      gemm(from, packed, FloatSink(kernels_, packed, from.rows, to, scales.data(), 1, 0));
      const int64_t found = cpu::test_forks - before;
      floats_.same(&found, &expected, 1);
    }
  }

  // Weights whose rows or whose columns are contiguous.
  void packing(int64_t n, int64_t k, Dtype dtype, int bits) {
    const std::vector<uint8_t> w = floats(n * k, dtype);
    for (bool transposed : {false, true}) {
      const Place place = transposed ? Place::kBehindGuard : Place::kBeforeGuard;
      const StridedFloats weight = {w_.copy(w, place), dtype, n, k, transposed ? 1 : k,
                                    transposed ? n : 1};
      cpu::test_threads = 1;
      const PackedCopy expected = packed_copy(ref_, weight, bits);
      for (int64_t threads : kThreads) {
        cpu::test_threads = threads;
        packing_.begin(text_of(0, n, k) + ", operands " + name_of(place));
        const PackedCopy found = packed_copy(kernels_, weight, bits);
        packing_.same(found.block.data(), expected.block.data(), round_up(n, kPanel) * padded_k(k));
        packing_.same(found.colsum.data(), expected.colsum.data(), round_up(n, kPanel));
        packing_.same(found.scale.data(), expected.scale.data(), n);
      }
    }
  }

  void passed() const {
    sums_.passed();
    floats_.passed();
    packing_.passed();
  }

 private:
  struct PackedCopy {
    std::vector<int8_t> block;
    std::vector<int32_t> colsum;
    std::vector<float> scale;
  };

  static std::vector<int8_t> transpose(const Product& p) {
    std::vector<int8_t> t(p.w.size());
    for (int64_t i = 0; i < p.n * p.k; ++i) t[i % p.k * p.n + i / p.k] = p.w[i];
    return t;
  }

  // Bytes of finite numbers.
  static std::vector<uint8_t> floats(int64_t count, Dtype dtype) {
    std::vector<uint8_t> bytes;
    for (float value : numbers(Numbers::kPlain, count)) {
      const uint32_t bits = __builtin_bit_cast(uint32_t, value);
      const uint16_t half = static_cast<uint16_t>(
          dtype == Dtype::kBFloat16 ? bits >> 16 : bits & 0xbfff);  // of float16 any below 2
      const uint8_t* from = dtype == Dtype::kFloat32 ? reinterpret_cast<const uint8_t*>(&bits)
                                                     : reinterpret_cast<const uint8_t*>(&half);
      bytes.insert(bytes.end(), from, from + (dtype == Dtype::kFloat32 ? 4 : 2));
    }
    return bytes;
  }

  static PackedCopy packed_copy(const Kernels& kernels, const StridedFloats& w, int bits) {
    const int64_t padded_n = round_up(w.n, kPanel);
    PackMemory memory;
    const PackedWeight p = pack_floats(kernels, w, {bits, true, false}, memory);
    return {{p.blocks, p.blocks + padded_n * padded_k(w.k)},
            {p.colsum, p.colsum + padded_n},
            {p.scale, p.scale + w.n}};
  }

  void sums_of(const Product& p, const std::vector<int8_t>& codes, int64_t stride_n,
               int64_t stride_k, Place place) {
    sums_.begin(text_of(p.m, p.n, p.k) + ", operands " + name_of(place));
    // Aligned to its values, of four bytes each.
    auto* packed =
        reinterpret_cast<int8_t*>(packed_.get<int32_t>(packed_size(p.n, p.k) / 4, place));
    pack({w_.copy(codes, place), p.n, p.k, stride_n, stride_k}, {}, packed);
    Weight opened = {};
    const std::string fault = open_weight(packed, packed_size(p.n, p.k), &opened);
    if (!fault.empty()) throw Failure("a packed weight is refused: " + fault);
    const PackedWeight& w = opened.whole;
    std::vector<int8_t> unpacked(p.w.size());
    unpack(w, unpacked.data());
    sums_.same(unpacked.data(), p.w.data(), p.n * p.k);
    int32_t* found = out_.get<int32_t>(p.m * p.n, place);
    const int8_t* q = q_.copy(p.q, place);
    const int32_t* zero_points = zeros_.copy(p.zero_points, place);
    in_chunks(kernels_, w, p.m, [&](int64_t first, int64_t count) {
      const CodeRows from(kernels_, w, q + first * p.k, zero_points + first, 1, count);
      gemm(from, w, IntegerSink(w, from.rows, found + first * p.n));
    });
    sums_.same(found, p.sums.data(), p.m * p.n);
  }

  // Two weights at once, the second of fewer columns.
  void several(const Product& p, int64_t threads) {
    sums_.begin(text_of(p.m, p.n, p.k) + ", twice, " + std::to_string(threads) + " threads");
    const int64_t fewer = (p.n + 1) / 2;
    PackMemory first, second;
    std::vector<int32_t> found(static_cast<size_t>(p.m * (p.n + fewer)));
    std::vector<int8_t> whole(packed_size(p.n, p.k)), half(packed_size(fewer, p.k));
    pack({p.w.data(), p.n, p.k, p.k, 1}, {}, whole.data());
    pack({p.w.data(), fewer, p.k, p.k, 1}, {}, half.data());
    Weight a = {}, b = {};
    open_weight(whole.data(), packed_size(p.n, p.k), &a);
    open_weight(half.data(), packed_size(fewer, p.k), &b);
    const CodeRows from(kernels_, a.whole, p.q.data(), p.zero_points.data(), 1, p.m);
    const IntegerSink of_a(a.whole, from.rows, found.data());
    const IntegerSink of_b(b.whole, from.rows, found.data() + p.m * p.n);
    const cpu::Product products[] = {{a.whole, of_a}, {b.whole, of_b}};
    gemm(from, products);
    sums_.same(found.data(), p.sums.data(), p.m * p.n);
    for (int64_t i = 0; i < p.m; ++i) {
      sums_.same(found.data() + p.m * p.n + i * fewer, p.sums.data() + i * p.n, fewer);
    }
  }

  std::vector<float> linear_of(const Kernels& kernels, const std::vector<uint8_t>& x, int64_t m,
                               const StridedFloats& w, const CodeSpec& spec) {
    floats_.begin(text_of(m, w.n, w.k));
    PackMemory memory;
    const PackedWeight packed = pack_floats(kernels, w, {spec.bits, true, false}, memory);
    const FloatMatrix matrix = {q_.copy(x, Place::kBeforeGuard), w.dtype, m, w.k};
    TensorCode shared = {};
    std::vector<float> scales(static_cast<size_t>(m + 1));
    if (spec.per_tensor) shared = choose_tensor_code(kernels, matrix, spec, scales.data());
    const FloatRows from(kernels, packed, matrix, spec, spec.per_tensor ? &shared : nullptr,
                         scales.data());
    float* out = out_.get<float>(m * w.n, Place::kBeforeGuard);
    const std::vector<float> bias(static_cast<size_t>(w.n), 0.25f);
    const bool has_bias = (m + w.k) % 2 == 0;  // each activation with and without
    const FloatOutput to = {has_bias ? bias.data() : nullptr,
                            static_cast<Activation>((m + w.n + w.k) % 5), Dtype::kFloat32,
                            reinterpret_cast<char*>(out)};
    gemm(from, packed,
         FloatSink(kernels, packed, from.rows, to, scales.data(), spec.per_tensor ? 0 : 1, 0));
    return {out, out + m * w.n};
  }

  const Kernels &kernels_, &ref_;
  Subject sums_, floats_, packing_;
  Pages q_, w_, packed_, zeros_, out_;
};

}  // namespace

void check_gemm(const Kernels& kernels) {
  GemmTest test(kernels);
  for (const auto& [m, n, k] : kShapes) {
    for (int kind = 0; kind < kOperandKinds; ++kind) {
      test.sums(Product(limits_of(static_cast<Operands>(kind)), m, n, k));
    }
    for (Dtype dtype : kDtypes) {
      for (const CodeSpec& spec : kSpecs) test.linear(m, n, k, dtype, spec);
      for (int bits : {4, 7, 8}) test.packing(n, k, dtype, bits);
    }
  }
  test.forks();
  for (const auto& [m, n, k, threads] : kMoreThreadsThanPanels) {
    test.parts_of_k(m, n, k, threads);
  }
  for (const Tuning& tuning : kTunings) {
    const WithTuning set(kernels, tuning);
    for (const auto& [m, n, k] : kShapes) {
      test.sums(Product(limits_of(Operands::kWide), m, n, k));
      test.linear(m, n, k, Dtype::kFloat32, kSpecs[1]);
    }
  }
  cpu::test_threads = 1;
  test.passed();
}

}  // namespace qfx::test
