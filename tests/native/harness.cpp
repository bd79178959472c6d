#include "harness.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "cpu/kernels/selfcheck.h"
#include "cpu/kernels/tables/rows.h"

namespace qfx::test {
namespace {

char current_case[512] = "before the first case";

// Only what a signal handler may call.
void on_fault(int) {
  static constexpr char text[] = " touched memory outside its operands\n";
  (void)!write(STDOUT_FILENO, current_case, std::strlen(current_case));
  (void)!write(STDOUT_FILENO, text, sizeof(text) - 1);
  _exit(1);
}

void read_one_too_many() {
  Pages pages;
  volatile const int8_t* at = pages.get<int8_t>(5, Place::kBeforeGuard);
  (void)at[5];
}

void write_one_too_early() {
  Pages pages;
  volatile int32_t* at = pages.get<int32_t>(5, Place::kBehindGuard);
  at[-1] = 0;
}

void stay_inside() {
  Pages pages;
  for (Place place : kPlaces) pages.get<float>(5, place);
}

}  // namespace

const char* name_of(Place place) {
  if (place == Place::kBeforeGuard) return "before a page that faults";
  return place == Place::kBehindGuard ? "behind a page that faults" : "not aligned";
}

Pages::~Pages() {
  const int64_t page = sysconf(_SC_PAGESIZE);
  if (begin_ != nullptr) munmap(begin_ - page, static_cast<size_t>(size_ + 2 * page));
}

void* Pages::get(int64_t count, int64_t size, Place place) {
  reserve((count + 1) * size);
  uint8_t* at = place == Place::kBeforeGuard ? begin_ + size_ - count * size
                : place == Place::kOdd       ? begin_ + size
                                             : begin_;
  std::memset(at, kCanary, static_cast<size_t>(count * size));
  return at;
}

void Pages::reserve(int64_t bytes) {
  if (bytes <= size_ && begin_ != nullptr) return;
  this->~Pages();
  const int64_t page = sysconf(_SC_PAGESIZE);
  size_ = (std::max<int64_t>(bytes, 1) + page - 1) / page * page;
  void* all = mmap(nullptr, static_cast<size_t>(size_ + 2 * page), PROT_NONE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) throw std::bad_alloc();
  begin_ = static_cast<uint8_t*>(all) + page;
  if (mprotect(begin_, static_cast<size_t>(size_), PROT_READ | PROT_WRITE) != 0) {
    throw std::bad_alloc();
  }
}

bool same_value(float a, float b) {
  return std::memcmp(&a, &b, sizeof(a)) == 0 || (std::isnan(a) && std::isnan(b));
}

void Subject::begin(const std::string& what) {
  ++cases_;
  what_ = what;
  std::snprintf(current_case, sizeof(current_case), "%s (%s)", name_.c_str(), what_.c_str());
}

void Subject::same_floats(Dtype dtype, const void* found, const void* expected,
                          int64_t count) const {
  if (dtype == Dtype::kFloat32) {
    return same(static_cast<const float*>(found), static_cast<const float*>(expected), count);
  }
  std::vector<float> values(static_cast<size_t>(2 * count));
  kernels_ref().row->widen(found, dtype, count, values.data());
  kernels_ref().row->widen(expected, dtype, count, values.data() + count);
  same(values.data(), values.data() + count, count);
}

void Subject::passed() const {
  std::printf("%s ok, %lld cases\n", name_.c_str(), static_cast<long long>(cases_));
}

void Subject::differs(int64_t i, const std::string& found, const std::string& expected) const {
  throw Failure(name_ + ": element " + std::to_string(i) + " is " + found + ", expected " +
                expected + " (" + what_ + ")");
}

void report_faults() {
  struct sigaction action = {};
  action.sa_handler = on_fault;
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
}

int status_of_child(void (*f)()) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    if (std::freopen("/dev/null", "w", stdout) == nullptr) _exit(2);
    f();
    _exit(0);
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

std::vector<const Kernels*> kernels_here() {
  std::vector<const Kernels*> found;
  for (Isa isa : compiled_isas()) {
    if (supported(isa)) found.insert(found.begin(), &kernels_of(isa));
  }
  return found;
}

Limits limits_of(Operands operands) {
  const bool narrow_codes = operands == Operands::kNarrowCodes || operands == Operands::kNarrow;
  const bool narrow_weight = operands == Operands::kNarrowWeight || operands == Operands::kNarrow;
  return {narrow_codes ? -64 : -128, narrow_codes ? 63 : 127, narrow_weight ? -64 : -128,
          narrow_weight ? 64 : 127};
}

int8_t code_at(int64_t i, int64_t k, int low, int high) {
  switch (i % 4) {
    case 0:
      return static_cast<int8_t>(low);
    case 1:
      return static_cast<int8_t>(high);
    case 2:
      return static_cast<int8_t>(k % 2 ? low : high);
    default:
      return static_cast<int8_t>(low + hash(i * 65537 + k) % (high - low + 1));
  }
}

uint32_t hash(uint64_t i) {
  i = (i + 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u;
  i = (i ^ (i >> 31)) * 0x94d049bb133111ebu;
  return static_cast<uint32_t>(i >> 32);
}

std::vector<float> numbers(Numbers kind, int64_t count) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kTiny[] = {0.f, -0.f, 1e-45f, -1e-45f, 0x1p-126f, -0x1.8p-127f, 0x1p-120f};
  constexpr float kHuge[] = {0x1.fffffep127f, -0x1.fffffep127f, 1.f, -0x1p126f, 65504.f, -0.f};
  constexpr float kBroken[] = {1.f, kInfinity, -kInfinity, kNan, -kNan, -2.f, 0.f};
  std::vector<float> x(static_cast<size_t>(count));
  for (size_t i = 0; i < x.size(); ++i) {
    const uint32_t r = hash(i * 4 + static_cast<uint64_t>(kind));
    const float plain = (static_cast<float>(r >> 8) * 0x1p-24f - 0.5f) * (r % 7 == 0 ? 9.f : 2.f);
    x[i] = kind == Numbers::kPlain  ? plain
           : kind == Numbers::kTiny ? kTiny[r % 7]
           : kind == Numbers::kHuge ? kHuge[r % 6]
                                    : kBroken[r % 7];
  }
  return x;
}

WithTuning::WithTuning(const Kernels& kernels, const Tuning& tuning) : kernels_(kernels) {
  for (const Format* format : formats_of(kernels)) set_tuning(*format, tuning);
}

WithTuning::~WithTuning() {
  for (const Format* format : formats_of(kernels_)) set_tuning(*format, default_tuning(*format));
}

std::vector<int64_t> sizes() {
  std::vector<int64_t> all = {127, 128, 515, 2049};
  for (int64_t n = 0; n <= 70; ++n) all.push_back(n);
  return all;
}

void check_guards() {
  Subject subject("guard pages");
  const struct {
    const char* what;
    void (*access)();
    int status;
  } cases[] = {{"reading behind the end", read_one_too_many, 1},
               {"writing before the beginning", write_one_too_early, 1},
               {"staying inside", stay_inside, 0}};
  for (const auto& c : cases) {
    subject.begin(c.what);
    const int status = status_of_child(c.access);
    subject.same(&status, &c.status, 1);
  }
  subject.passed();
}

}  // namespace qfx::test
