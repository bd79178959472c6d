// How much memory and work the bytes of a file account for: what needs more is damaged, or was not
// written by qfx.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "c_api/tensor_file.h"

namespace qfx {

// Throws Refused beyond 2^63, with what it is of.
int64_t sum_of(std::span<const int64_t> all, const char* what);

// The bytes of weights and other constants, without instructions: a file cannot raise its limits by
// having more of them.
int64_t weight_bytes(const TensorFile& file);

// Memory that lasts beside the weights: a cache, or inputs and results.
struct Lasting {
  int64_t bytes;
  const char* what;
};

// Throws Refused if `working` bytes are more than these weights and this memory account for, or if
// all of them are more than `max_memory`.
void check_memory(int64_t weights, Lasting lasting, int64_t working, int64_t max_memory);

// Throws Refused if one run of `what` takes more operations than `tokens` that meet all weights,
// and `steps` passes over a cache, account for.
void check_work(const std::string& what, double work, int64_t tokens, int64_t weights,
                int64_t steps, int64_t cache);

}  // namespace qfx
