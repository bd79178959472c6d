#include "c_api/model.h"

#include <unistd.h>

#include <utility>

#include "c_api/json.h"
#include "c_api/limits.h"
#include "cpu/gemm/integrity.h"

namespace qfx {
namespace {

constexpr int64_t kFormat = 5;  // FORMAT of qfx/generate/program_file.py

int64_t memory_of_machine() { return sysconf(_SC_PAGE_SIZE) * sysconf(_SC_PHYS_PAGES); }

int64_t elements_of(const Kind& kind) { return kind.bytes() / element_of(kind.dtype); }

// The memory of a graph before it is taken.
void check_before(const Json& told, const TensorFile& file, int64_t max_memory) {
  std::vector<int64_t> arrays, working;
  for (const Kind& kind : kinds_of(told.at("inputs"))) arrays.push_back(kind.bytes());
  const std::vector<Json>& bytes = told.at("bytes").as_list("the bytes of a program");
  if (bytes.empty()) throw Refused("a program has no memory");
  working.push_back(bytes[0].integer_in(0, kMostSize, "a number of bytes of memory"));
  for (const Json& each : told.at("made").as_list("the results of a program")) {
    arrays.push_back(each.integer_in(0, kMostSize, "a number of bytes of memory"));
  }
  check_memory(weight_bytes(file), {sum_of(arrays, "memory"), "inputs and results"},
               sum_of(working, "memory"), max_memory);
}

void check_after(const Graph& graph, const TensorFile& file) {
  if (graph.writes(graph.inputs().size())) throw Refused("the graph writes to its inputs");
  std::vector<int64_t> elements = {1};
  for (const Kind& kind : graph.inputs()) elements.push_back(elements_of(kind));
  for (const Graph::Result& result : graph.results()) elements.push_back(elements_of(result.kind));
  check_work("the graph", graph.work(), sum_of(elements, "memory"), weight_bytes(file), 0, 0);
}

}  // namespace

Model::Model(const std::string& path, int64_t max_memory) {
  const int64_t room = max_memory > 0 ? max_memory : memory_of_machine();
  file_ = read_tensors(path, room);
  cpu::forget_whole();  // weights may be at the address of others that were freed
  const auto text = file_.metadata.find("qfx_programs");
  if (text == file_.metadata.end()) throw Refused("it holds no programs");
  const Json told = parsed_json(text->second);
  const Json& format = told.as_object("its description").at("format");
  if (format.kind != Json::Kind::kInteger || format.integer != kFormat) {
    throw Refused("its programs have format " + format.shown() + ", and this qfx reads format " +
                  std::to_string(kFormat) + ": save them again with this qfx");
  }
  if (const Json* described = told.find("graph")) {
    check_before(described->as_object("a program"), file_, room);
    graph.emplace(*described, file_);
    check_after(*graph, file_);
  } else {
    decoder.emplace(told, file_, room);
  }
}

}  // namespace qfx
