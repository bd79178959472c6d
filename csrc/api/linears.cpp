// qfx::linear_dynamic and qfx::linears as the Python code that Inductor generates calls them: by
// the addresses of tensors whose sizes the compiler knows. A call of the dispatcher from Python
// takes 6 us, of which a linear of one short row takes 2.
#include <vector>

#include "api/api.h"
#include "api/call_arguments.h"
#include "api/recorded_call.h"

namespace qfx {
namespace {

// The numbers in their order: those of the call, and then of each weight.
enum Number { kHasFactor, kRows, kK, kDtypeOfX, kDtypeOfY, kCode, kNumbers = kCode + 5 };
constexpr int64_t kMostWeights = 64;

// The operator of so many weights, for errors and profilers.
const char* operator_of(int64_t weights) { return weights == 1 ? "linear_dynamic" : "linears"; }

// The tensors: x, then each weight and its bias where it has one, then the factor if there is one.
// The number of weights comes last.
void call_linears(std::span<const void* const> tensors, Numbers numbers, void* y) {
  const int64_t weights = numbers.empty() ? 0 : numbers.back();
  const bool plausible = weights >= 1 && weights <= kMostWeights && tensors.size() >= 2;
  if (!plausible ||
      static_cast<int64_t>(numbers.size()) != kNumbers + weights * kWeightNumbers + 1) {
    throw std::invalid_argument("linears: arguments are missing");
  }
  const char* op = operator_of(weights);
  TensorsOfCall from(op, tensors);
  cpu::LinearsAt call = {};
  call.x = from.take<void>();
  call.dtype = dtype_at(op, numbers[kDtypeOfX]);
  call.rows = numbers[kRows];
  call.k = numbers[kK];
  call.code = activation_code_of(op, numbers.subspan(kCode, 5));
  call.out_dtype = dtype_at(op, numbers[kDtypeOfY]);
  std::vector<cpu::LinearWeightAt> each;
  for (int64_t i = 0; i < weights; ++i) {
    each.push_back(weight_of(op, from, numbers.subspan(kNumbers + i * kWeightNumbers)));
  }
  if (numbers[kHasFactor] != 0) call.factor = from.take<float>();
  from.finish();
  call.y = y;
  const RecordedCall recorded(weights == 1 ? "qfx::linear_dynamic" : "qfx::linears");
  cpu::linears_at(op, call, each);
}

}  // namespace
}  // namespace qfx

QfxStatus qfx_api_linears(const void* const* tensors, int64_t tensor_count, const int64_t* numbers,
                          int64_t count, void* y) {
  return qfx::answer_call("linears", [&] {
    qfx::call_linears({tensors, static_cast<size_t>(tensor_count)},
                      {numbers, static_cast<size_t>(count)}, y);
  });
}
