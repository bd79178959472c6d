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

}  // namespace

void attend_backward(const Kernels& kernels, const AttentionGradient& all) {
  parallel(all.forward.heads(), steps_of(all), [&](int64_t begin, int64_t end) {
    HeadGradient gradient(kernels, all);
    for (int64_t head = begin; head < end; ++head) gradient.run(head);
  });
}

}  // namespace qfx::cpu
