// A call that does not pass through the dispatcher, for profilers.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

// torch 2.11 may lack them: then profilers do not see the call.
#pragma weak aoti_record_function_start
#pragma weak aoti_record_function_end

namespace qfx {

// Shows profilers a call of an operator, such as "qfx::linear", while it lives.
class RecordedCall {
 public:
  explicit RecordedCall(const char* name) {
    if (aoti_record_function_start == nullptr) return;
    aoti_record_function_start(name, nullptr, nullptr, 0, &handle_);
  }
  ~RecordedCall() {
    if (handle_ != nullptr) aoti_record_function_end(handle_);
  }
  RecordedCall(const RecordedCall&) = delete;
  RecordedCall& operator=(const RecordedCall&) = delete;

 private:
  AtenRecordFunctionHandle handle_ = nullptr;
};

}  // namespace qfx
