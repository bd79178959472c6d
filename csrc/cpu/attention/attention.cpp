#include "cpu/attention/attention.h"

#include <algorithm>

#include "cpu/attention/rows.h"
#include "cpu/attention/shares.h"
#include "cpu/core/parallel.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kCodesAtOnce = 1 << 20;  // bytes of codes for each thread, which stay in L2
constexpr int64_t kStepsPerElement = 32;   // of quantizing and packing, in parallel.h's unit
constexpr int64_t kStepsPerScore = 64;     // of softmax

// Some heads, whose codes lie in memory at once.
class Heads {
 public:
  Heads(const Kernels& kernels, const Attention& a, int64_t first, std::vector<HeadCodes> codes)
      : kernels_(kernels), a_(a), first_(first), codes_(std::move(codes)) {}

  void pack() const {
    const int64_t panels = (a_.k.rows + kPanel - 1) / kPanel;
    const int64_t elements = count() * a_.k.rows * (a_.k.columns + a_.v.columns);
    const int64_t threads = threads_for(elements * kStepsPerElement);
    spread(threads, count(), [&](int64_t i) {
      const int64_t head = first_ + i;
      find_center(kernels_, a_, a_.keys[head].k, a_.queries[head * a_.group()].mask,
                  codes_[i].center, codes_[i].centered);
    });
    spread(threads, count() * panels, [&](int64_t i) {
      pack_panel(kernels_, a_, first_ + i / panels, i % panels, codes_[i / panels]);
    });
  }

  void attend() const {
    const RowWork work = {count() * a_.group(), a_.q.rows, a_.k.rows, a_.causal};
    const Format& format = format_for(kernels_, Operands::kWide, a_.group() * a_.q.rows);
    const int64_t products = work.total() * (a_.q.columns + 2 * a_.v.columns);
    const int64_t steps = work_of(tuning_of(format), products) + work.total() * kStepsPerScore;
    const int64_t threads = threads_for(steps);
    const std::vector<int64_t> cuts = shares(work, threads);
    on_threads(threads, [&](int64_t i) { attend(cuts[i], cuts[i + 1]); });
  }

 private:
  int64_t count() const { return static_cast<int64_t>(codes_.size()); }

  // each(i) for 0..all, in as many equal shares.
  template <typename F>
  static void spread(int64_t threads, int64_t all, const F& each) {
    threads = std::clamp<int64_t>(threads, 1, std::max<int64_t>(all, 1));
    on_threads(threads, [&](int64_t t) {
      for (int64_t i = t * all / threads; i < (t + 1) * all / threads; ++i) each(i);
    });
  }

  // Rows counted through all heads.
  void attend(int64_t begin, int64_t end) const {
    if (begin == end) return;
    const int64_t rows = a_.group() * a_.q.rows;
    AttentionRows block(kernels_, a_, std::min(rows, end - begin));
    for (int64_t r = begin; r < end;) {
      const int64_t head = r / rows, first = r % rows;
      const int64_t left = std::min(end - r, rows - first);
      const int64_t count = std::min(left, block.rows());
      block.run(first_ + head, codes_[head], first, count);
      r += count;
    }
  }

  const Kernels& kernels_;
  const Attention& a_;
  int64_t first_;
  std::vector<HeadCodes> codes_;
};

// Whether heads that share keys have masks of their own, so that each may have another center.
bool masked_apart(const Attention& a) {
  if (a.causal || a.group() == 1) return false;
  for (int64_t i = 0; i < a.heads() * a.group(); ++i) {
    if (a.queries[i].mask != a.queries[i / a.group() * a.group()].mask) return true;
  }
  return false;
}

// The same with a head of keys for each of queries.
Attention unshared(const Attention& a) {
  Attention apart = a;
  apart.keys.clear();
  for (const KeyHead& head : a.keys) apart.keys.insert(apart.keys.end(), a.group(), head);
  return apart;
}

}  // namespace

void attend(const Kernels& kernels, const Attention& a) {
  if (masked_apart(a)) return attend(kernels, unshared(a));
  thread_local Scratch scratch;
  const HeadSizes size = {a.k.rows, a.k.columns, a.v.columns};
  const int64_t bytes = HeadCodes(size, nullptr).bytes;
  const int64_t at_once = std::max<int64_t>(1, thread_count() * kCodesAtOnce / bytes);
  char* memory = scratch.get<char>(std::min(at_once, a.heads()) * bytes);
  for (int64_t first = 0; first < a.heads(); first += at_once) {
    std::vector<HeadCodes> codes;
    for (int64_t i = 0; i < std::min(at_once, a.heads() - first); ++i) {
      codes.emplace_back(size, memory + i * bytes);
    }
    const Heads heads(kernels, a, first, std::move(codes));
    heads.pack();
    heads.attend();
  }
}

}  // namespace qfx::cpu
