// How often the guard of a site (B5) made rows run in float, since the process began.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace qfx::cpu {

struct GuardCounts {
  int64_t calls = 0, rows = 0;
  int64_t float_calls = 0, float_rows = 0;  // with rows in float, and those rows
};

// Adds one call. A site without a name is not counted.
void count_guarded(const std::string& site, int64_t rows, int64_t float_rows);

std::map<std::string, GuardCounts> guard_counts();

// The counts of one site, which then has none.
GuardCounts take_guard_counts(const std::string& site);

}  // namespace qfx::cpu
