// Codes of 4 and 5 bits: groups unpacked, and tiles of few rows, against plain loops over what a
// panel holds. (E4)
#include "cpu/kernels/tables/lowbit.h"

#include <algorithm>
#include <cmath>

#include "cpu/kernels/tables/rows.h"
#include "harness.h"

namespace qfx::test {
namespace {

constexpr int64_t kLengths[] = {32, 64, 128};

// A panel, by what tables/lowbit.h says of it.
struct CodePanel {
  int bits;
  int64_t group, groups;
  bool has_zero;
  int64_t block, fifth;  // bytes of a group, and where its fifth bits are
  std::vector<uint8_t> bytes, zero;

  CodePanel(int bits, int64_t group, int64_t groups, bool has_zero)
      : bits(bits),
        group(group),
        groups(groups),
        has_zero(has_zero),
        block(64 + group / 8 * 128 + (bits == 5 ? group / 8 * 32 : 0)),
        fifth(64 + group / 8 * 128),
        bytes(static_cast<size_t>(groups * block)) {
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(hash(i + bits));
    for (int64_t g = 0; g < groups; ++g) {
      for (int n = 0; n < kPanel; ++n) {
        for (int64_t k = 0; k < group && n % 4 < 3; ++k) put(g, k, n, extreme(n, k));
        if (has_zero) zero.push_back(static_cast<uint8_t>(hash(g * kPanel + n) % (1 << bits)));
      }
    }
  }

  int code(int64_t g, int64_t k, int n) const {
    const uint8_t byte = bytes[static_cast<size_t>(nibble_at(g, k, n))];
    int u = k % 8 < 4 ? byte % 16 : byte / 16;
    if (bits == 5) {
      const int64_t bit = fifth_at(g, k, n);
      u += (bytes[static_cast<size_t>(bit / 8)] >> (bit % 8) & 1) * 16;
    }
    return u;
  }

  int zero_of(int64_t g, int n) const {
    return has_zero ? zero[static_cast<size_t>(g * kPanel + n)] : 1 << (bits - 1);
  }

  float scale(int64_t g, int n, Dtype dtype) const {
    float value;
    kernels_ref().row->widen(bytes.data() + g * block + 2 * n, dtype, 1, &value);
    return value;
  }

 private:
  int extreme(int n, int64_t k) const { return code_at(n % 4, k, 0, (1 << bits) - 1); }

  int64_t nibble_at(int64_t g, int64_t k, int n) const {
    return g * block + 64 + (k / 8 * 32 + n) * 4 + k % 4;
  }
  int64_t fifth_at(int64_t g, int64_t k, int n) const {
    const int64_t word = (k / 8 * 2 + k % 8 / 4) * 2 + n / 16;
    return 8 * (g * block + fifth + 8 * word) + 4 * (n % 16) + k % 4;
  }

  void put(int64_t g, int64_t k, int n, int u) {
    uint8_t& byte = bytes[static_cast<size_t>(nibble_at(g, k, n))];
    byte = static_cast<uint8_t>(k % 8 < 4 ? (byte & 0xf0) | (u & 15) : (byte & 15) | (u & 15) << 4);
    if (bits == 4) return;
    const int64_t bit = fifth_at(g, k, n);
    uint8_t& of = bytes[static_cast<size_t>(bit / 8)];
    of = static_cast<uint8_t>((of & ~(1 << bit % 8)) | (u >> 4) << bit % 8);
  }
};

class UnpackTest {
 public:
  explicit UnpackTest(const Kernels& kernels)
      : table_(*kernels.lowbit), subject_(std::string("unpack_lowbit__") + kernels.isa) {}

  void run(const CodePanel& panel, int64_t depth, Place place) {
    subject_.begin(std::to_string(panel.bits) + " bits, " + std::to_string(depth) + " of " +
                   std::to_string(panel.group) + " k, operands " + name_of(place));
    const uint8_t* zero = panel.has_zero ? zero_.copy(panel.zero, place) : nullptr;
    int8_t* codes = codes_.get<int8_t>(depth * kPanel, place);
    int32_t* colsum = sums_.get<int32_t>(kPanel, place);
    const UnpackGroupFn unpack = table_.unpack[panel.bits - kFewestBits];
    unpack(bytes_.copy(panel.bytes, place), depth, panel.group, zero, codes, colsum);
    std::vector<int8_t> expected(static_cast<size_t>(depth * kPanel));
    std::vector<int32_t> sums(kPanel);
    for (int64_t k = 0; k < depth; ++k) {
      for (int n = 0; n < kPanel; ++n) {
        const int code = panel.code(0, k, n) - panel.zero_of(0, n);
        expected[static_cast<size_t>((k / 4 * kPanel + n) * 4 + k % 4)] = static_cast<int8_t>(code);
        sums[static_cast<size_t>(n)] += code;
      }
    }
    subject_.same(codes, expected.data(), depth * kPanel);
    subject_.same(colsum, sums.data(), kPanel);
  }

  void passed() const { subject_.passed(); }

 private:
  const LowbitKernels& table_;
  Subject subject_;
  Pages bytes_, zero_, codes_, sums_;
};

// As many rows as the tallest tile has, and their products with a panel.
struct Product {
  const CodePanel& panel;
  Dtype dtype;
  int64_t rows, last_depth, depth, row_step;
  std::vector<int8_t> q;
  std::vector<int32_t> row_sum;
  std::vector<float> row_scale, expected;

  Product(const CodePanel& panel, int64_t rows, int64_t last_depth, Dtype dtype)
      : panel(panel),
        dtype(dtype),
        rows(rows),
        last_depth(last_depth),
        depth((panel.groups - 1) * panel.group + last_depth),
        row_step(rows + 2),
        expected(static_cast<size_t>(rows * kPanel)) {
    for (int64_t i = 0; i < rows * depth; ++i)
      q.push_back(code_at(i / depth + i / 29 % 2, i % depth, -128, 127));
    for (int64_t g = 0; g < panel.groups; ++g) {
      for (int64_t m = 0; m < row_step; ++m) {
        row_sum.push_back(m < rows ? sum_of(m, g) : 1 << 20);
        row_scale.push_back(static_cast<float>(hash(g * row_step + m) % 1000) * 0x1p-9f);
      }
      for (int64_t i = 0; i < rows * kPanel; ++i) add(g, i / kPanel, static_cast<int>(i % kPanel));
    }
  }

  int64_t length(int64_t g) const { return g + 1 < panel.groups ? panel.group : last_depth; }

 private:
  int code(int64_t m, int64_t g, int64_t k) const {
    return q[static_cast<size_t>(m * depth + g * panel.group + k)];
  }

  int32_t sum_of(int64_t m, int64_t g) const {
    int32_t sum = 0;
    for (int64_t k = 0; k < length(g); ++k) sum += code(m, g, k);
    return sum;
  }

  void add(int64_t g, int64_t m, int n) {
    int32_t exact = 0;
    for (int64_t k = 0; k < length(g); ++k) {
      exact += code(m, g, k) * (panel.code(g, k, n) - panel.zero_of(g, n));
    }
    float& sum = expected[static_cast<size_t>(m * kPanel + n)];
    const float scale = row_scale[static_cast<size_t>(g * row_step + m)] * panel.scale(g, n, dtype);
    sum = std::fma(static_cast<float>(exact), scale, sum);
  }
};

class TileTest {
 public:
  explicit TileTest(const Kernels& kernels)
      : table_(*kernels.lowbit), subject_(std::string("lowbit__") + kernels.isa) {}

  // Two panels are one and the same, each behind its zero points as in a weight.
  void run(const Product& of, int hint, int rows, Place place, int panels) {
    const CodePanel& panel = of.panel;
    subject_.begin(std::to_string(panel.bits) + " bits, " + std::to_string(panel.groups) +
                   " groups of " + std::to_string(panel.group) + ", the last of " +
                   std::to_string(of.last_depth) + ", " + std::to_string(rows) + " rows, hint " +
                   std::to_string(hint) + (panel.has_zero ? ", zero points" : "") + ", " +
                   std::to_string(panels) + " panels, operands " + name_of(place));
    const int64_t ldq = of.depth + 5;
    std::vector<int8_t> q(static_cast<size_t>((rows - 1) * ldq + of.depth));
    for (int m = 0; m < rows; ++m)
      std::copy_n(of.q.data() + m * of.depth, of.depth, q.data() + m * ldq);
    const auto of_rows = static_cast<size_t>((panel.groups - 1) * of.row_step + rows);
    const std::vector<int32_t> sum(of.row_sum.begin(), of.row_sum.begin() + of_rows);
    const std::vector<float> scale(of.row_scale.begin(), of.row_scale.begin() + of_rows);
    const size_t front = panel.has_zero ? (panel.zero.size() + 63) / 64 * 64 : 0;
    std::vector<uint8_t> bytes;
    for (int p = 0; p < panels; ++p) {
      if (panel.has_zero) bytes.insert(bytes.end(), panel.zero.begin(), panel.zero.end());
      bytes.resize(p * (front + panel.bytes.size()) + front);
      bytes.insert(bytes.end(), panel.bytes.begin(), panel.bytes.end());
    }
    const uint8_t* data = bytes_.copy(bytes, place);
    const int64_t size = rows * kPanel;
    float* found = sums_.get<float>(panels * size, place);
    table_.few[panel.bits - kFewestBits][hint][rows - 1](
        {rows, q_.copy(q, place), ldq, data + front, panel.block, panel.groups, panel.group,
         of.last_depth, panel.has_zero ? data : nullptr, panels,
         static_cast<int64_t>(front + panel.bytes.size()), of.dtype,
         1 << 12,  // what lies ahead faults
         sum_.copy(sum, place), scale_.copy(scale, place), of.row_step, found});
    for (int p = 0; p < panels; ++p) subject_.same(found + p * size, of.expected.data(), size);
  }

  // Every tile of every hint.
  void run(const Product& of) {
    for (int hint = 0; hint < kHints; ++hint) {
      for (int rows = 1; rows <= table_.rows->few.rows; ++rows) {
        for (Place place : kPlaces) {
          for (int panels : {1, 2}) run(of, hint, rows, place, panels);
        }
      }
    }
  }

  void passed() const { subject_.passed(); }

 private:
  const LowbitKernels& table_;
  Subject subject_;
  Pages q_, bytes_, sum_, scale_, sums_;
};

void check_tiles_of(TileTest& tiles, const CodePanel& panel, int64_t rows) {
  for (int64_t last : {int64_t{32}, panel.group - 32, panel.group}) {
    if (last == 0) continue;
    for (Dtype dtype : {Dtype::kBFloat16, Dtype::kFloat16}) {
      tiles.run(Product(panel, rows, last, dtype));
    }
  }
}

}  // namespace

void check_lowbit(const Kernels& kernels) {
  UnpackTest unpack(kernels);
  TileTest tiles(kernels);
  const Format* rows = kernels.lowbit->rows;
  for (int bits = kFewestBits; bits < kFewestBits + kBitWidths; ++bits) {
    for (int64_t group : kLengths) {
      for (bool has_zero : {false, true}) {
        const CodePanel alone(bits, group, 1, has_zero), several(bits, group, 3, has_zero);
        for (int64_t depth = 8; depth <= group; depth += 8) {
          for (Place place : kPlaces) unpack.run(alone, depth, place);
        }
        if (rows == nullptr) continue;
        check_tiles_of(tiles, alone, rows->few.rows);
        check_tiles_of(tiles, several, rows->few.rows);
      }
    }
  }
  unpack.passed();
  if (rows != nullptr) tiles.passed();
}

}  // namespace qfx::test
