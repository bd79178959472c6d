#include "cuda/sm90/choice.h"

#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace qfx::cuda {
namespace {

using sm90::Config;
using sm90::Operands;

constexpr int kHopper = 90;
constexpr int kMostSplits = 16;
constexpr int kFillSteps = 4;  // that pass until a tile's first stage is there

const Choice kPortable = {"portable", 1};

// Coordinates and counts are int32 in the Hopper kernels, tiles come in twos for clusters, and
// their copy engine has no empty tensor.
bool within_sm90(const Sizes& s) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / (2 * kMostSplits);
  if (s.batch < 1 || s.m < 1 || s.n < 1 || s.k_bytes < 1) return false;
  return std::max({s.batch, s.m, s.n, s.k_bytes}) <= kMost &&
         static_cast<double>(s.batch) * static_cast<double>(s.m) * static_cast<double>(s.n) / 512 <
             kMost;
}

int64_t sm90_steps(const Sizes& s) { return ceil_div(s.k_bytes, sm90::kTileBytes); }

// Time in steps of a 128 x 256 tile. A step takes as long as its products or its bytes from L2, of
// which the large tile needs a fifth more time than for its products, unless the blocks of a
// cluster load the right one together; parts of K write and read sums.
double rule_cost(const Config& c, const Sizes& s, int splits, int multiprocessors) {
  constexpr double kProducts = 128. * 256, kBytes = (128 + 256) / 1.2;
  const double rows = c.left + static_cast<double>(c.right) / c.cluster;
  const double step = std::max(c.left * c.right / kProducts, rows / kBytes);
  const double sums = splits == 1 ? 0 : 8. * c.left * c.right / c.stage_bytes();
  const int blocks = std::max(multiprocessors / c.cluster, 1) * c.cluster;
  const int64_t rounds = ceil_div(tile_count(c, s) * splits, blocks);
  const double steps = static_cast<double>(ceil_div(sm90_steps(s), splits)) + kFillSteps + sums;
  return static_cast<double>(rounds) * steps * step;
}

int most_splits(const Sizes& s) {
  return static_cast<int>(std::clamp<int64_t>(sm90_steps(s) / kFillSteps, 1, kMostSplits));
}

// The best number of parts of K for one kernel.
int splits_by_rule(const Config& c, const Sizes& s, int multiprocessors) {
  int best = 1;
  for (int splits = 2; splits <= most_splits(s); ++splits) {
    if (rule_cost(c, s, splits, multiprocessors) < rule_cost(c, s, best, multiprocessors)) {
      best = splits;
    }
  }
  return best;
}

// In octaves. A measured size of fewer rows is one octave farther: rows beyond a tile cost another.
double distance(const Sizes& measured, const Sizes& s) {
  const auto ratio = [](int64_t x, int64_t y) {
    return std::abs(std::log2(static_cast<double>(x)) - std::log2(static_cast<double>(y)));
  };
  return ratio(measured.batch, s.batch) + ratio(measured.m, s.m) + ratio(measured.n, s.n) +
         ratio(measured.k_bytes, s.k_bytes) + (measured.m < s.m ? 1 : 0);
}

std::string names() {
  std::string text;
  for (const Candidate& c : candidates()) text += std::string(text.empty() ? "" : ", ") + c.name;
  return text;
}

const Candidate* find(const std::string& name) {
  for (const Candidate& c : candidates()) {
    if (name == c.name) return &c;
  }
  return nullptr;
}

// "name" or "name/splits".
Choice parse(const std::string& forced, const Sizes& size, int multiprocessors) {
  const size_t slash = forced.find('/');
  const std::string name = forced.substr(0, slash);
  const Candidate* kernel = find(name);
  STD_TORCH_CHECK(kernel != nullptr, "QFX_CUDA_KERNEL=", forced,
                  ": there is no such kernel; there are portable, sm90 (the one that should be the "
                  "fastest), ",
                  names());
  if (slash == std::string::npos) {
    return {name, splits_by_rule(kernel->config, size, multiprocessors)};
  }
  const std::string count = forced.substr(slash + 1);
  const bool digits = !count.empty() && count.size() <= 3 &&
                      count.find_first_not_of("0123456789") == std::string::npos;
  const int splits = digits ? std::stoi(count) : 0;
  STD_TORCH_CHECK(splits >= 1 && splits <= kMostSplits, "QFX_CUDA_KERNEL=", forced,
                  ": the parts of K are '", count, "', expected 1 to ", kMostSplits);
  return {name, static_cast<int>(std::min<int64_t>(splits, sm90_steps(size)))};
}

}  // namespace

const std::vector<Candidate>& candidates() {
  static const std::vector<Candidate> rows = {
#define QFX_S8(name, ...) {#name, sm90::k_##name},
#define QFX_B1(name, ...) {#name, sm90::k_##name},
#include "cuda/sm90/kernels.inc"
#undef QFX_S8
#undef QFX_B1
  };
  return rows;
}

const Candidate& candidate(const std::string& name) {
  const Candidate* found = find(name);
  STD_TORCH_CHECK(found != nullptr, "there is no Hopper kernel '", name, "'");
  return *found;
}

const std::vector<Measured>& measurements() {
  static const std::vector<Measured> rows = {
#include "cuda/sm90/measured.inc"
  };
  return rows;
}

Choice choose(Operands operands, const Sizes& size, const Gpu& gpu,
              const std::vector<Measured>& measured) {
  if (!within_sm90(size)) return kPortable;
  const Measured* nearest = nullptr;
  for (const Measured& row : measured) {
    if (row.gpu != gpu.name || row.operands != operands) continue;
    if (nearest == nullptr || distance(row.size, size) < distance(nearest->size, size)) {
      nearest = &row;
    }
  }
  if (nearest == nullptr) return kPortable;
  const int64_t most = std::min<int64_t>(nearest->choice.splits, sm90_steps(size));
  return {nearest->choice.kernel, static_cast<int>(most)};
}

Choice choose_by_rule(Operands operands, const Sizes& size, int multiprocessors) {
  if (!within_sm90(size)) return kPortable;
  Choice best = kPortable;
  double least = std::numeric_limits<double>::infinity();
  for (const Candidate& c : candidates()) {
    if (c.config.operands != operands) continue;
    const int splits = splits_by_rule(c.config, size, multiprocessors);
    const double cost = rule_cost(c.config, size, splits, multiprocessors);
    if (cost < least) best = {c.name, splits};
    least = std::min(least, cost);
  }
  return best;
}

Choice choose_or_force(Operands operands, const Sizes& size, const Gpu& gpu,
                       const std::string& forced) {
  if (forced.empty()) return choose(operands, size, gpu, measurements());
  if (forced == "portable") return kPortable;
  STD_TORCH_CHECK(gpu.capability == kHopper, "QFX_CUDA_KERNEL=", forced,
                  " asks for a kernel for compute capability 9.0, but ", gpu.name, " has ",
                  gpu.capability / 10, ".", gpu.capability % 10);
  if (!within_sm90(size)) return kPortable;
  if (forced == "sm90") return choose_by_rule(operands, size, gpu.multiprocessors);
  const Choice named = parse(forced, size, gpu.multiprocessors);
  if (candidate(named.kernel).config.operands == operands) return named;
  return choose(operands, size, gpu, measurements());
}

}  // namespace qfx::cuda
