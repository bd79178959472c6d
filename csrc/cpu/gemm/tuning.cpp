#include "cpu/gemm/tuning.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <mutex>
#include <stdexcept>

#include "cpu/core/parallel.h"
#include "cpu/core/vendor.h"

namespace qfx::cpu {
namespace {

constexpr int kFields = std::size(kTuningFields);
constexpr int kMostFormats = 64;  // all instruction sets have a dozen

// Cells are taken from the first on and never released; the format is written last.
struct Cell {
  std::atomic<const Format*> format;
  std::atomic<int64_t> values[kFields];
};
Cell cells[kMostFormats];

// The cell of a format, or the first that is free.
Cell& cell_of(const Format& format) {
  const auto ends = [&](const Cell& cell) {
    const Format* its = cell.format.load(std::memory_order_acquire);
    return its == &format || its == nullptr;
  };
  Cell* found = std::find_if(std::begin(cells), std::end(cells), ends);
  if (found == std::end(cells)) throw std::logic_error("more formats than cells for their tuning");
  return *found;
}

}  // namespace

std::string fault_of(const Tuning& tuning) {
  for (const TuningField& field : kTuningFields) {
    const int64_t value = tuning.*field.value;
    if (value >= field.least && value <= field.most) continue;
    return std::string(field.name) + "=" + std::to_string(value) + " is not between " +
           std::to_string(field.least) + " and " + std::to_string(field.most);
  }
  return "";
}

int64_t hint_named(const std::string& name) {
  const auto* found = std::find(std::begin(kHintNames), std::end(kHintNames), name);
  if (found != std::end(kHintNames)) return found - std::begin(kHintNames);
  throw std::invalid_argument("hint='" + name + "' is none of: t0, t1, nta");
}

std::string fault_of(const Streaming& how) { return fault_of(with_streaming(Tuning{}, &how)); }

Tuning with_streaming(Tuning tuning, const Streaming* how) {
  constexpr int64_t kMostRows = 64;  // a format streams no more of them than it has tiles for
  if (how == nullptr) return tuning;
  tuning.hint = how->hint;
  tuning.ahead = how->ahead;
  tuning.streams = how->streams;
  tuning.stream_rows = kMostRows;
  return tuning;
}

Tuning default_tuning(const Format& format) {
  Tuning tuning = format.tuning;
  if (made_by_amd()) {
    const bool zen5 = family() >= 26;  // else as measured on a Zen 4
    tuning.hint = zen5 ? kNta : kT1;
    tuning.ahead = zen5 ? 4096 : 1024;
    const bool wide = format.tile_rows >= 12;  // AVX-512
    tuning.stream_rows = wide && !zen5 ? 5 : 2;
    if (wide && !zen5) tuning.packed_rows = 48;
    tuning.streams = 1;
    tuning.block_depth = std::min<int64_t>(tuning.block_depth, 768);  // a first cache of 32 KB
  }
  return tuning;
}

Tuning tuning_of(const Format& format) {
  const Cell& cell = cell_of(format);
  if (cell.format.load(std::memory_order_acquire) == nullptr) return default_tuning(format);
  Tuning tuning;
  for (int i = 0; i < kFields; ++i) {
    tuning.*kTuningFields[i].value = cell.values[i].load(std::memory_order_relaxed);
  }
  return tuning;
}

int64_t work_of(const Tuning& tuning, int64_t products) {
  constexpr double kMost = int64_t{1} << 40;  // some seconds; a batch of it does not overflow
  const double serial = std::max(static_cast<double>(tuning.serial_steps), 0x1p-20);
  return static_cast<int64_t>(
      std::min(static_cast<double>(products) * kSerialWork / serial, kMost));
}

void set_tuning(const Format& format, const Tuning& tuning) {
  const std::string fault = fault_of(tuning);
  if (!fault.empty()) throw std::invalid_argument(fault);
  static std::mutex setting;
  const std::lock_guard<std::mutex> lock(setting);
  Cell& cell = cell_of(format);
  for (int i = 0; i < kFields; ++i) {
    cell.values[i].store(tuning.*kTuningFields[i].value, std::memory_order_relaxed);
  }
  cell.format.store(&format, std::memory_order_release);
}

}  // namespace qfx::cpu
