// The parameters in use of each operand format (kernels/tables/tuning.h): those of its table, those
// of the family of this processor, or what was set.
#pragma once

#include <string>

#include "cpu/kernels/tables/tiles.h"

namespace qfx::cpu {

// A parameter by name, and its bounds.
struct TuningField {
  const char* name;
  int64_t Tuning::* value;
  int64_t least, most;
};

inline constexpr TuningField kTuningFields[] = {
    {"block_depth", &Tuning::block_depth, 64, 1 << 20},
    {"block_rows", &Tuning::block_rows, 1, 1 << 14},
    {"block_bytes", &Tuning::block_bytes, 0, int64_t{1} << 40},
    {"stream_rows", &Tuning::stream_rows, 0, 64},
    {"hint", &Tuning::hint, 0, kHints - 1},
    {"ahead", &Tuning::ahead, 0, 1 << 20},
    {"streams", &Tuning::streams, 1, 2},
    {"minimum_rows", &Tuning::minimum_rows, 0, 1 << 20},
    {"packed_rows", &Tuning::packed_rows, 0, 64},
    {"packed_ahead", &Tuning::packed_ahead, 0, 1 << 20},
    {"near_bytes", &Tuning::near_bytes, 0, int64_t{1} << 40},
    {"far_bytes", &Tuning::far_bytes, 0, int64_t{1} << 40},
    {"serial_steps", &Tuning::serial_steps, 0, int64_t{1} << 40}};
inline constexpr const char* kHintNames[kHints] = {"t0", "t1", "nta"};

// Throws std::invalid_argument for a name that is none of these.
int64_t hint_named(const std::string& name);

// A sentence about the first parameter out of bounds, or an empty string.
std::string fault_of(const Tuning& tuning);

// Where nothing was measured: of the format, and of the family of this processor.
Tuning default_tuning(const Format& format);

// How weights are streamed for few rows, in place of what is set for their format.
struct Streaming {
  int64_t hint, ahead, streams;
};

// A sentence about what is out of bounds, or an empty string.
std::string fault_of(const Streaming& how);

Tuning with_streaming(Tuning tuning, const Streaming* how);

// What is in use. Waits for no one; while another thread sets them, some parameters may be the old
// ones and some the new.
Tuning tuning_of(const Format& format);

// So many multiply-accumulates in the unit of core/parallel.h, in which `serial_steps` of them are
// as long as what is not worth another thread.
int64_t work_of(const Tuning& tuning, int64_t products);

// Throws std::invalid_argument with fault_of's sentence.
void set_tuning(const Format& format, const Tuning& tuning);

}  // namespace qfx::cpu
