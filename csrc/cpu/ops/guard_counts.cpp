#include "cpu/ops/guard_counts.h"

#include <mutex>

namespace qfx::cpu {
namespace {

struct Table {
  std::mutex mutex;
  std::map<std::string, GuardCounts> counts;
};

Table& table() {
  static Table* const kept = new Table;  // operators may run while the process ends
  return *kept;
}

}  // namespace

void count_guarded(const std::string& site, int64_t rows, int64_t float_rows) {
  if (site.empty()) return;
  const std::lock_guard<std::mutex> lock(table().mutex);
  GuardCounts& counts = table().counts[site];
  ++counts.calls;
  counts.rows += rows;
  counts.float_calls += float_rows > 0;
  counts.float_rows += float_rows;
}

std::map<std::string, GuardCounts> guard_counts() {
  const std::lock_guard<std::mutex> lock(table().mutex);
  return table().counts;
}

GuardCounts take_guard_counts(const std::string& site) {
  const std::lock_guard<std::mutex> lock(table().mutex);
  const auto found = table().counts.extract(site);
  return found.empty() ? GuardCounts{} : found.mapped();
}

}  // namespace qfx::cpu
