// Parameters of formats, as Python reads, sets and measures them.
#include "cpu/gemm/tuning.h"

#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "api/answer.h"
#include "api/api.h"
#include "cpu/gemm/timing.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/kernels/selfcheck.h"

struct QfxTimedProduct {
  qfx::cpu::TimedProduct product;
};

namespace qfx {
namespace {

using cpu::Format;
using cpu::Isa;
using cpu::Kernels;
using cpu::kTuningFields;
using cpu::Tuning;
using cpu::TuningField;
using Parameters = std::span<const QfxParameter>;

const Kernels& kernels_named(const std::string& isa) {
  for (Isa known : cpu::compiled_isas()) {
    if (isa == cpu::name_of(known)) return cpu::kernels_of(known);
  }
  throw std::invalid_argument("this build has no kernels for an instruction set '" + isa + "'");
}

// Of an instruction set that this processor runs.
const Kernels& usable_kernels_named(const std::string& isa) {
  for (Isa usable : cpu::usable_isas()) {
    if (isa == cpu::name_of(usable)) return cpu::kernels_of(usable);
  }
  throw std::invalid_argument("this processor does not run the instruction set '" + isa + "'");
}

const Format& format_named(const Kernels& kernels, const std::string& name) {
  std::string names;
  for (const Format* format : cpu::formats_of(kernels)) {
    if (name == format->name) return *format;
    names += std::string(names.empty() ? "" : ", ") + format->name;
  }
  throw std::invalid_argument(std::string(kernels.isa) + " has no format '" + name +
                              "', but: " + names);
}

int64_t integer_of(const QfxParameter& given) {
  if (given.is_integer) return given.integer;
  throw WrongType(std::string(given.name) + " is an integer, got " + given.text);
}

void set_parameter(Tuning& tuning, const QfxParameter& given) {
  std::string names;
  for (const TuningField& field : kTuningFields) {
    names += std::string(names.empty() ? "" : ", ") + field.name;
    if (std::string(given.name) != field.name) continue;
    if (field.value == &Tuning::hint) {
      tuning.hint = cpu::hint_named(given.text);
    } else {
      tuning.*field.value = integer_of(given);
    }
    return;
  }
  throw std::invalid_argument("a format has no parameter '" + std::string(given.name) +
                              "', but: " + names);
}

// Those of each format in use, with some changed. All are read before any is set.
std::map<const Format*, Tuning> changed(const Kernels& kernels, Parameters parameters) {
  std::map<const Format*, Tuning> found;
  for (const QfxParameter& given : parameters) {
    const Format& format = format_named(kernels, given.format);
    if (given.name == nullptr) continue;
    set_parameter(found.try_emplace(&format, cpu::tuning_of(format)).first->second, given);
  }
  for (const auto& [format, tuning] : found) {
    const std::string fault = cpu::fault_of(tuning);
    if (fault.empty()) continue;
    throw std::invalid_argument(std::string(kernels.isa) + ", format " + format->name + ": " +
                                fault);
  }
  return found;
}

void add_tunings(const char* isa, bool defaults, const Rows& rows) {
  for (const Format* format : cpu::formats_of(kernels_named(isa))) {
    const Tuning tuning = defaults ? cpu::default_tuning(*format) : cpu::tuning_of(*format);
    std::vector<int64_t> numbers;
    for (const TuningField& field : kTuningFields) numbers.push_back(tuning.*field.value);
    rows.add(format->name, cpu::kHintNames[tuning.hint], numbers);
  }
}

// What of a format there is to choose: the greatest number of rows with tiles for each hint and
// with pairs of panels, and the format below it.
void add_choices(const char* isa, const Rows& rows) {
  for (const Format* format : cpu::formats_of(kernels_named(isa))) {
    const char* below = format->below == nullptr ? "" : format->below->name;
    const std::array<int64_t, 2> most = {format->few.rows, format->pairs.rows};
    rows.add(format->name, below, most);
  }
}

// Of a format whose other parameters are those in use.
double seconds(cpu::TimedProduct& product, const char* isa, const char* name, Parameters parameters,
               int64_t rows, int64_t calls) {
  const Kernels& kernels = usable_kernels_named(isa);
  const Format& format = format_named(kernels, name);
  const auto tunings = changed(kernels, parameters);
  const auto found = tunings.find(&format);
  return product.seconds(format, found == tunings.end() ? cpu::tuning_of(format) : found->second,
                         rows, calls);
}

}  // namespace
}  // namespace qfx

using namespace qfx;

QfxStatus qfx_api_tuning_fields(QfxTake take, void* to) {
  return answer([&] {
    for (const TuningField& field : kTuningFields) Rows(take, to).add(field.name);
  });
}

QfxStatus qfx_api_tuning(const char* isa, bool defaults, QfxTake take, void* to) {
  return answer([&] { add_tunings(isa, defaults, Rows(take, to)); });
}

QfxStatus qfx_api_set_tuning(const char* isa, const QfxParameter* parameters, int64_t count,
                             bool check_only) {
  return answer([&] {
    const auto made = changed(kernels_named(isa), {parameters, static_cast<size_t>(count)});
    if (check_only) return;
    for (const auto& [format, tuning] : made) cpu::set_tuning(*format, tuning);
  });
}

QfxStatus qfx_api_choices(const char* isa, QfxTake take, void* to) {
  return answer([&] { add_choices(isa, Rows(take, to)); });
}

QfxStatus qfx_api_make_timed_product(int64_t most_rows, int64_t k, int64_t n, int64_t weights,
                                     QfxTimedProduct** made) {
  return answer([&] { *made = new QfxTimedProduct{{most_rows, k, n, weights}}; });
}

void qfx_api_free_timed_product(QfxTimedProduct* product) { delete product; }

QfxStatus qfx_api_time_product(QfxTimedProduct* product, const char* isa, const char* format,
                               const QfxParameter* parameters, int64_t count, int64_t rows,
                               int64_t calls, double* out) {
  return answer([&] {
    const Parameters all(parameters, static_cast<size_t>(count));
    *out = seconds(product->product, isa, format, all, rows, calls);
  });
}
