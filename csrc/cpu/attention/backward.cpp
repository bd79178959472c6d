#include "cpu/attention/backward.h"

#include "cpu/attention/head_gradient.h"
#include "cpu/core/parallel.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kProducts = 6;         // of two matrices, as large as the scores are deep
constexpr int64_t kStepsPerScore = 160;  // of softmax and codes, in parallel.h's unit

int64_t steps_of(const AttentionGradient& all) {
  const Attention& a = all.forward;
  const int64_t scores = a.group() * a.q.rows * a.k.rows;
  return a.heads() * scores * (kProducts / 2 * (a.q.columns + a.v.columns) + kStepsPerScore);
}

// One head of queries on each thread, whose parts of the gradients of keys are added afterwards:
// where there are fewer heads of keys than threads. The same bits.
void attend_backward_by_queries(const Kernels& kernels, const AttentionGradient& all) {
  thread_local Scratch scratch;
  const Attention& a = all.forward;
  const int64_t queries = a.heads() * a.group(), size = HeadGradient(kernels, all).partial_size();
  float* parts = scratch.get<float>(queries * size);
  parallel(queries, steps_of(all), [&](int64_t begin, int64_t end) {
    HeadGradient gradient(kernels, all);
    for (int64_t i = begin; i < end; ++i) gradient.run_query(i, parts + i * size);
  });
  parallel(a.heads(), queries * size, [&](int64_t begin, int64_t end) {
    HeadGradient gradient(kernels, all);
    for (int64_t i = begin; i < end; ++i) gradient.store(i, parts + i * a.group() * size);
  });
}

}  // namespace

void attend_backward(const Kernels& kernels, const AttentionGradient& all) {
  const Attention& a = all.forward;
  if (a.group() > 1 && a.heads() < threads_for(steps_of(all))) {
    return attend_backward_by_queries(kernels, all);
  }
  parallel(a.heads(), steps_of(all), [&](int64_t begin, int64_t end) {
    HeadGradient gradient(kernels, all);
    for (int64_t head = begin; head < end; ++head) gradient.run(head);
  });
}

}  // namespace qfx::cpu
