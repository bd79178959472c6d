// Programs, as Python makes and runs them.
#include "cpu/program/program.h"

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "api/answer.h"
#include "api/api.h"
#include "cpu/gemm/tuning.h"

using qfx::answer;
using qfx::Rows;

struct QfxProgram {
  qfx::cpu::Program program;
};

namespace {

thread_local int (*poll_of_caller)() = nullptr;

void look() {
  if (poll_of_caller != nullptr && poll_of_caller() != 0) throw qfx::Stopped();
}

}  // namespace

QfxStatus qfx_api_make_program(const int64_t* words, int64_t word_count, const int64_t* bytes,
                               const int64_t* addresses, int64_t slots, QfxProgram** made) {
  return answer([&] {
    const std::span<const int64_t> all(words, static_cast<size_t>(word_count));
    *made = new QfxProgram{{all, {bytes, bytes + slots}, {addresses, addresses + slots}}};
  });
}

void qfx_api_free_program(QfxProgram* program) { delete program; }

QfxStatus qfx_api_run_program(QfxProgram* program, const int64_t* places, int64_t place_count,
                              const int64_t* given, int64_t count, int (*poll)()) {
  return answer([&] {
    poll_of_caller = poll;
    const std::span<const int64_t> addresses(given, static_cast<size_t>(count));
    if (places == nullptr) return program->program.run(addresses, look);
    program->program.run({places, static_cast<size_t>(place_count)}, addresses, look);
  });
}

QfxStatus qfx_api_stream_program(QfxProgram* program, const char* hint, int64_t ahead,
                                 int64_t streams) {
  return answer([&] {
    if (*hint == '\0') return program->program.stream({});
    program->program.stream(qfx::cpu::Streaming{qfx::cpu::hint_named(hint), ahead, streams});
  });
}

double qfx_api_program_work(const QfxProgram* program) { return program->program.work(); }

QfxStatus qfx_api_program_written(const QfxProgram* program, QfxTake take, void* to) {
  return answer([&] {
    const auto& written = program->program.written();
    Rows(take, to).add(std::vector<int64_t>(written.begin(), written.end()));
  });
}

QfxStatus qfx_api_program_weights(const QfxProgram* program, QfxTake take, void* to) {
  return answer([&] {
    for (const qfx::cpu::Streamed& w : program->program.streamed()) {
      const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(w.data));
      Rows(take, to).add(std::array<int64_t, 3>{address, w.bytes, w.rows});
    }
  });
}
