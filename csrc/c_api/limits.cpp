#include "c_api/limits.h"

#include <algorithm>
#include <cstdio>

#include "c_api/graph.h"
#include "c_api/json.h"

namespace qfx {
namespace {

std::string rounded(double number) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", number);
  return text;
}

}  // namespace

int64_t sum_of(std::span<const int64_t> all, const char* what) {
  int64_t found = 0;
  for (const int64_t each : all) {
    if (__builtin_add_overflow(found, each, &found)) {
      throw Refused(std::string(what) + " is more than 2^63 bytes");
    }
  }
  return found;
}

int64_t weight_bytes(const TensorFile& file) {
  int64_t found = 0;
  for (const auto& [_, tensor] : file.tensors) found += tensor.type == "U8" ? tensor.bytes : 0;
  return found;
}

void check_memory(int64_t weights, Lasting lasting, int64_t working, int64_t max_memory) {
  constexpr int64_t kSmall = 1 << 26;  // bytes that any file may use
  const int64_t all[] = {weights, lasting.bytes, working};
  const int64_t total = sum_of(all, "memory");
  const int64_t most = std::min(total - working, kMostBytes) * 4 + kSmall;
  const std::string held = std::to_string(lasting.bytes);
  if (working > most) {
    throw Refused("it needs " + std::to_string(working) + " bytes of working memory, and " +
                  std::to_string(weights) + " bytes of weights and " + held + " bytes of " +
                  lasting.what + " explain at most " + std::to_string(most));
  }
  if (total > max_memory) {
    throw Refused("it needs " + std::to_string(total) + " bytes of memory, " + held +
                  " of them for the " + lasting.what + ", and max_memory is " +
                  std::to_string(max_memory));
  }
}

void check_work(const std::string& what, double work, int64_t tokens, int64_t weights,
                int64_t steps, int64_t cache) {
  // Operations for each byte of weights, which several layers may share; for each byte of a cache,
  // which several heads share; and those that any token may take.
  constexpr double kWeights = 16, kCache = 128, kSmall = 1 << 18;
  const double most =
      static_cast<double>(tokens) * (kWeights * static_cast<double>(weights) + kSmall) +
      static_cast<double>(steps) * kCache * static_cast<double>(cache);
  if (work > most) {
    throw Refused(what + " takes " + rounded(work) + " operations, and " + std::to_string(weights) +
                  " bytes of weights and " + std::to_string(cache) +
                  " bytes of cache explain at most " + rounded(most));
  }
}

}  // namespace qfx
