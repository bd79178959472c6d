// Runs a graph of fixed shapes, such as an encoder, without Python and PyTorch:
//
//   encode encoder.safetensors input.bin result.bin
//
// The file comes from qfx.generate.save_program. input.bin holds the elements of all inputs, one
// after another; result.bin will hold those of all results. Prints what they are.
#include <qfx/programs.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <vector>

namespace {

using Bytes = std::unique_ptr<char[]>;

void check(int status) {
  if (status == QFX_OK) return;
  std::fprintf(stderr, "%s\n", qfx_error());
  std::exit(1);
}

struct Free {
  void operator()(qfx_program* program) const { qfx_program_free(program); }
};

void print(const char* what, const qfx_array& array) {
  static const char* const kNames[] = {"float32", "int64", "int32",    "int8",
                                       "uint8",   "bool",  "bfloat16", "float16"};
  std::printf("%s: %s", what, kNames[array.dtype]);
  for (int64_t i = 0; i < array.axes; ++i) std::printf(" %ld", static_cast<long>(array.sizes[i]));
  std::printf("\n");
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) {
    std::fprintf(stderr, "usage: encode FILE INPUT RESULT\n");
    return 2;
  }
  qfx_program* loaded = nullptr;
  check(qfx_program_load(arguments[1], 0, &loaded));
  const std::unique_ptr<qfx_program, Free> program(loaded);

  std::ifstream input(arguments[2], std::ios::binary);
  std::vector<Bytes> inputs, results;
  std::vector<const void*> from;
  for (int64_t i = 0; i < qfx_program_inputs(program.get()); ++i) {
    qfx_array array = {};
    check(qfx_program_input(program.get(), i, &array));
    print("input", array);
    inputs.push_back(std::make_unique<char[]>(static_cast<size_t>(array.bytes)));
    if (!input.read(inputs.back().get(), array.bytes)) {
      std::fprintf(stderr, "%s has fewer bytes than the inputs\n", arguments[2]);
      return 1;
    }
    from.push_back(inputs.back().get());
  }
  std::vector<void*> to;
  std::vector<int64_t> bytes;
  for (int64_t i = 0; i < qfx_program_results(program.get()); ++i) {
    qfx_array array = {};
    check(qfx_program_result(program.get(), i, &array));
    print("result", array);
    results.push_back(std::make_unique<char[]>(static_cast<size_t>(array.bytes)));
    to.push_back(results.back().get());
    bytes.push_back(array.bytes);
  }

  check(qfx_program_run(program.get(), from.data(), to.data()));
  std::ofstream output(arguments[3], std::ios::binary);
  for (size_t i = 0; i < results.size(); ++i) output.write(results[i].get(), bytes[i]);
  return output.good() ? 0 : 1;
}
