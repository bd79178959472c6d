// Greedy generation by a file of programs, without Python and PyTorch:
//
//   generate model.safetensors 20 1 5 9      # 20 tokens that follow the tokens 1 5 9
//
// The file comes from qfx.generate.save_programs with a batch size of 1; a tokenizer is not part of
// it. Prints the ids of the new tokens.
#include <qfx/programs.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

namespace {

void check(int status) {
  if (status == QFX_OK) return;
  std::fprintf(stderr, "%s\n", qfx_error());
  std::exit(1);
}

struct Free {
  void operator()(qfx_program* program) const { qfx_program_free(program); }
};

}  // namespace

int main(int count, char** arguments) {
  if (count < 4) {
    std::fprintf(stderr, "usage: generate FILE NEW_TOKENS ID [ID ...]\n");
    return 2;
  }
  qfx_program* loaded = nullptr;
  check(qfx_program_load(arguments[1], 0, &loaded));
  const std::unique_ptr<qfx_program, Free> program(loaded);
  qfx_decoder model = {};
  check(qfx_program_decoder(program.get(), &model));
  if (model.batch != 1) {
    std::fprintf(stderr, "the file has a batch size of %ld, expected 1\n",
                 static_cast<long>(model.batch));
    return 1;
  }
  std::vector<int64_t> tokens;
  for (int i = 3; i < count; ++i) tokens.push_back(std::atoll(arguments[i]));
  std::vector<float> logits(static_cast<size_t>(model.vocabulary));
  for (long left = std::atol(arguments[2]); left > 0; --left) {
    check(qfx_program_read(program.get(), tokens.data(), nullptr,
                           static_cast<int64_t>(tokens.size()), logits.data()));
    const int64_t next = std::max_element(logits.begin(), logits.end()) - logits.begin();
    std::printf("%ld ", static_cast<long>(next));
    tokens = {next};
  }
  std::printf("\n");
  return 0;
}
