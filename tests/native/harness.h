// What the native tests share: operands beside pages that fault, codes and numbers to fill them
// with, and the comparison that counts cases and stops at the first difference.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/gemm/tuning.h"
#include "cpu/kernels/dispatch.h"
#include "types.h"

namespace qfx::test {

using namespace qfx::cpu;

// Where an operand lies: its last byte before a page that faults, its first byte behind one, or one
// element further, so that it is not aligned either.
enum class Place { kBeforeGuard, kBehindGuard, kOdd };
inline constexpr Place kPlaces[] = {Place::kBeforeGuard, Place::kBehindGuard, Place::kOdd};

const char* name_of(Place place);

// Pages between two that fault; kept between cases.
class Pages {
 public:
  Pages() = default;
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  ~Pages();

  // `count` elements of `size` bytes at this place, every byte kCanary.
  void* get(int64_t count, int64_t size, Place place);

  template <typename T>
  T* get(int64_t count, Place place) {
    return static_cast<T*>(get(count, sizeof(T), place));
  }

  template <typename T>
  T* copy(const std::vector<T>& from, Place place) {
    T* to = get<T>(static_cast<int64_t>(from.size()), place);
    if (!from.empty()) std::memcpy(to, from.data(), from.size() * sizeof(T));
    return to;
  }

  static constexpr int kCanary = 0xa5;

 private:
  void reserve(int64_t bytes);

  uint8_t* begin_ = nullptr;
  int64_t size_ = 0;
};

// A difference, as a sentence.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <typename T>
bool same_value(T a, T b) {
  return a == b;
}
// Equal bits, -0 unlike 0; one NaN is as good as another.
bool same_value(float a, float b);

// A kernel under test and the cases it has passed.
class Subject {
 public:
  explicit Subject(std::string name) : name_(std::move(name)) {}

  // A new case; the sentence of a fault or difference ends with `what`.
  void begin(const std::string& what);

  template <typename T>
  void same(const T* found, const T* expected, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
      if (!same_value(found[i], expected[i])) {
        differs(i, std::to_string(found[i]), std::to_string(expected[i]));
      }
    }
  }

  // The same for float32, or for 16-bit floats as their values.
  void same_floats(Dtype dtype, const void* found, const void* expected, int64_t count) const;

  // "<kernel> ok, <n> cases"
  void passed() const;

 private:
  [[noreturn]] void differs(int64_t i, const std::string& found, const std::string& expected) const;

  std::string name_, what_;
  int64_t cases_ = 0;
};

// From now on an access that faults ends the process with a sentence that names the current case.
void report_faults();

// Exit status of f in a process of its own, whose output is dropped.
int status_of_child(void (*f)());

// Compiled and supported here, the reference first.
std::vector<const Kernels*> kernels_here();

// What a product of this kind may hold.
struct Limits {
  int a_low, a_high, w_low, w_high;
};
Limits limits_of(Operands operands);

// Line i of codes in [low, high]: all lowest, all highest, in turns, or mixed.
int8_t code_at(int64_t i, int64_t k, int low, int high);

// A number in [0, 2^32) that depends on all bits of i.
uint32_t hash(uint64_t i);

enum class Numbers { kPlain, kTiny, kHuge, kNotFinite };
inline constexpr Numbers kNumbers[] = {Numbers::kPlain, Numbers::kTiny, Numbers::kHuge,
                                       Numbers::kNotFinite};

std::vector<float> numbers(Numbers kind, int64_t count);

inline constexpr Dtype kDtypes[] = {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16};

inline int64_t element_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

// 0, 1, ..., 70 and a few greater ones: every tail of every vector width.
std::vector<int64_t> sizes();

// Parameters far from the default ones: small blocks, no stream, one or two of them.
inline constexpr Tuning kTunings[] = {
    {.block_depth = 64,
     .block_rows = 1,
     .stream_rows = 0,
     .near_bytes = 0,
     .far_bytes = 0,
     .serial_steps = 0},
    {.block_depth = 100, .block_rows = 7, .stream_rows = 1, .hint = kT0, .serial_steps = 0},
    {.block_depth = 1 << 20, .block_rows = 1 << 14, .stream_rows = 64, .hint = kNta, .streams = 2},
    {.block_depth = 300,
     .block_rows = 50,
     .block_bytes = 1 << 16,
     .stream_rows = 64,
     .ahead = 0,
     .streams = 2}};

// Every format of these kernels has these parameters while this lives.
class WithTuning {
 public:
  WithTuning(const Kernels& kernels, const Tuning& tuning);
  ~WithTuning();
  WithTuning(const WithTuning&) = delete;
  WithTuning& operator=(const WithTuning&) = delete;

 private:
  const Kernels& kernels_;
};

// The parts of the program; each throws Failure at the first difference.
void check_guards();
void check_parts();
void check_tiles(const Kernels& kernels);
void check_rows(const Kernels& kernels);
void check_rotate(const Kernels& kernels);
void check_columns(const Kernels& kernels);
void check_epilogue(const Kernels& kernels);
void check_weight_only(const Kernels& kernels);
void check_attention(const Kernels& kernels);
void check_cache(const Kernels& kernels);
void check_binary(const Kernels& kernels);
void check_gemm(const Kernels& kernels);
void check_groups(const Kernels& kernels);
void check_experts(const Kernels& kernels);
void check_convolutions(const Kernels& kernels);
void check_depthwise(const Kernels& kernels);
void check_lowbit(const Kernels& kernels);
void check_program(const Kernels& kernels);
void check_doctored(const Kernels& kernels);
void check_doctored_lowbit(const Kernels& kernels);

}  // namespace qfx::test
