// A program: instructions that run one after the other on slots of memory, without a framework
// between them. Slot 0 is memory of its own, all others are given: the addresses of constants when
// it is made, those of inputs and outputs at each run.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "cpu/program/instruction.h"

namespace qfx::cpu {

class Program {
 public:
  // words: for each instruction the number of words that follow, its Operation, and its operands.
  // bytes, addresses: of each slot; an address is 0 where it is given at each run.
  Program(std::span<const int64_t> words, std::vector<int64_t> bytes,
          std::vector<int64_t> addresses);
  Program(const Program&) = delete;  // instructions refer to what is its own
  Program& operator=(const Program&) = delete;

  // Called between instructions, after some work; what it throws ends the run there.
  using Poll = void (*)();

  // `given`: the addresses of the slots that had none. One run at a time.
  void run(std::span<const int64_t> given, Poll poll = nullptr);

  // Some of these addresses, by their places among them; the others are those of the run before.
  void run(std::span<const int64_t> places, std::span<const int64_t> given, Poll poll = nullptr);

  // How weights are streamed for few rows; nothing: as is set for their formats. Not during a run.
  void stream(const std::optional<Streaming>& how);

  std::vector<Streamed> streamed() const;                        // of each linear
  const std::set<int64_t>& written() const { return written_; }  // slots
  // Multiply-accumulates and elements of one run.
  double work() const;
  int64_t instructions() const { return static_cast<int64_t>(instructions_.size()); }

 private:
  void place(size_t i, int64_t address);
  void run_all(Poll poll) const;

  std::vector<char*> slots_;
  struct Given {
    size_t slot;
    int64_t bytes;
  };
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::vector<Given> given_;
  bool placed_ = false;  // all of them have an address
  std::unique_ptr<char, Free> memory_;
  std::optional<Streaming> streaming_;
  std::vector<Made> instructions_;
  std::set<int64_t> written_;
};

}  // namespace qfx::cpu
