// The functions of include/qfx/programs.h: no exception leaves them.
#include "include/qfx/programs.h"

#include <cstdio>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>

#include "c_api/model.h"
#include "c_api/threads.h"
#include "cpu/core/threads.h"
#include "cpu/kernels/dispatch.h"
#include "memory.h"

struct qfx_program {
  qfx::Model model;
  std::mutex turn = {};
};

namespace {

using qfx::Graph;
using qfx::Kind;

thread_local char last_error[2048] = "";

int failed(int status, const char* where, const std::exception& why) {
  std::snprintf(last_error, sizeof last_error, "%s: %s", where, why.what());
  return status;
}

// The status of f(), which may throw anything.
template <typename F>
int guarded(const char* where, const F& f) {
  last_error[0] = '\0';
  try {
    f();
    return QFX_OK;
  } catch (const std::invalid_argument& why) {
    return failed(QFX_ARGUMENT, where, why);
  } catch (const std::out_of_range& why) {  // a token or an index in an input
    return failed(QFX_ARGUMENT, where, why);
  } catch (const qfx::Unreadable& why) {
    return failed(QFX_FILE, where, why);
  } catch (const qfx::Refused& why) {
    return failed(QFX_REFUSED, where, why);
  } catch (const qfx::OutOfMemory& why) {
    return failed(QFX_MEMORY, where, why);
  } catch (const std::bad_alloc&) {
    return failed(QFX_MEMORY, where, std::runtime_error("out of memory"));
  } catch (const std::exception& why) {
    return failed(QFX_FAILED, where, why);
  } catch (...) {
    return failed(QFX_FAILED, where, std::runtime_error("an unknown error"));
  }
}

void expect(bool so, const char* why) {
  if (!so) throw std::invalid_argument(why);
}

template <typename T>
T& checked(T* pointer, const char* name) {
  if (pointer == nullptr) throw std::invalid_argument(std::string(name) + " is null");
  return *pointer;
}

Graph& graph_of(qfx_program& program) {
  expect(program.model.graph.has_value(),
         "this is a language model, which qfx_program_read runs, and no graph of fixed shapes");
  return *program.model.graph;
}

qfx::Decoder& decoder_of(qfx_program& program) {
  expect(program.model.decoder.has_value(),
         "this is a graph of fixed shapes, which qfx_program_run runs, and no language model");
  return *program.model.decoder;
}

// What is in the file is no program: invalid_argument of its instructions is a Refused here.
void load(const char* path, int64_t max_memory, qfx_program** program) {
  try {
    *program = new qfx_program{qfx::Model(path, max_memory)};
  } catch (const std::invalid_argument& why) {
    throw qfx::Refused(qfx::printable(path) + ": " + why.what());
  } catch (const qfx::Refused& why) {
    throw qfx::Refused(qfx::printable(path) + ": " + why.what());
  }
}

const Kind& kind_of(const qfx_program& program, int64_t index, bool result) {
  const auto& graph = program.model.graph;
  const size_t count = !graph ? 0 : result ? graph->results().size() : graph->inputs().size();
  if (index < 0 || static_cast<size_t>(index) >= count) {
    throw std::invalid_argument("index " + std::to_string(index) + " is none of the " +
                                std::to_string(count) + (result ? " results" : " inputs"));
  }
  const auto i = static_cast<size_t>(index);
  return result ? graph->results()[i].kind : graph->inputs()[i];
}

int describe(const char* where, const qfx_program* program, int64_t index, bool result,
             qfx_array* array) {
  return guarded(where, [&] {
    checked(array, "array");
    const Kind& kind = kind_of(checked(program, "program"), index, result);
    *array = {kind.dtype, static_cast<int64_t>(kind.sizes.size()), kind.sizes.data(), kind.bytes()};
  });
}

// The address of an array, which may hold elements of this kind.
int64_t address_of(const void* array, const Kind& kind, size_t i, const char* what) {
  const auto address = reinterpret_cast<intptr_t>(array);
  const bool missing = array == nullptr && kind.bytes() > 0;
  if (missing || address % qfx::element_of(kind.dtype) != 0) {
    throw std::invalid_argument(std::string(what) + " " + std::to_string(i) + " is " +
                                (missing ? "null" : "at an address between two elements") +
                                ", expected " + std::to_string(kind.bytes()) + " bytes of " +
                                qfx::name_of(kind.dtype));
  }
  return address;
}

}  // namespace

const char* qfx_version(void) { return QFX_VERSION; }

const char* qfx_error(void) { return last_error; }

int qfx_set_threads(int64_t count) {
  return guarded("qfx_set_threads", [&] { qfx::set_threads(count); });
}

int qfx_program_load(const char* path, int64_t max_memory, qfx_program** program) {
  if (program != nullptr) *program = nullptr;
  return guarded("qfx_program_load", [&] {
    checked(program, "program");
    checked(path, "path");
    expect(max_memory >= 0, "max_memory is negative");
    qfx::cpu::thread_count();  // these throw if QFX_NUM_THREADS or QFX_CPU_ISA are wrong
    qfx::cpu::current_isa();
    load(path, max_memory, program);
  });
}

void qfx_program_free(qfx_program* program) { delete program; }

int64_t qfx_program_inputs(const qfx_program* program) {
  if (program == nullptr) return -1;
  const auto& graph = program->model.graph;
  return graph ? static_cast<int64_t>(graph->inputs().size()) : 0;
}

int64_t qfx_program_results(const qfx_program* program) {
  if (program == nullptr) return -1;
  const auto& graph = program->model.graph;
  return graph ? static_cast<int64_t>(graph->results().size()) : 0;
}

int qfx_program_input(const qfx_program* program, int64_t index, qfx_array* array) {
  return describe("qfx_program_input", program, index, false, array);
}

int qfx_program_result(const qfx_program* program, int64_t index, qfx_array* array) {
  return describe("qfx_program_result", program, index, true, array);
}

int qfx_program_run(qfx_program* program, const void* const* inputs, void* const* results) {
  return guarded("qfx_program_run", [&] {
    Graph& graph = graph_of(checked(program, "program"));
    if (!graph.inputs().empty()) checked(inputs, "inputs");
    if (!graph.results().empty()) checked(results, "results");
    std::vector<int64_t> addresses;
    for (size_t i = 0; i < graph.inputs().size(); ++i) {
      addresses.push_back(address_of(inputs[i], graph.inputs()[i], i, "input"));
    }
    for (size_t i = 0; i < graph.results().size(); ++i) {
      address_of(results[i], graph.results()[i].kind, i, "result");
    }
    const std::lock_guard lock(program->turn);
    graph.run(addresses);
    for (size_t i = 0; i < graph.results().size(); ++i) {
      graph.copy(i, {}, static_cast<char*>(results[i]));
    }
  });
}

int qfx_program_decoder(const qfx_program* program, qfx_decoder* decoder) {
  return guarded("qfx_program_decoder", [&] {
    checked(decoder, "decoder");
    auto& whole = const_cast<qfx_program&>(checked(program, "program"));  // its lock
    const qfx::Decoder& found = decoder_of(whole);
    const std::lock_guard lock(whole.turn);
    *decoder = {found.batch(), found.length(), found.vocabulary(), found.seen()};
  });
}

int qfx_program_reset(qfx_program* program) {
  return guarded("qfx_program_reset", [&] {
    qfx::Decoder& decoder = decoder_of(checked(program, "program"));
    const std::lock_guard lock(program->turn);
    decoder.reset();
  });
}

int qfx_program_read(qfx_program* program, const int64_t* tokens, const uint8_t* attention_mask,
                     int64_t count, float* logits) {
  return guarded("qfx_program_read", [&] {
    qfx::Decoder& decoder = decoder_of(checked(program, "program"));
    checked(tokens, "tokens");
    checked(logits, "logits");
    const std::lock_guard lock(program->turn);
    decoder.read(tokens, attention_mask, count, logits);
  });
}
