// What of a product does not change its bits, and is decided by the processor that runs it.
//
// Files of an instruction set are compiled with its flags, so this header holds plain C types only:
// an inline function shared with other files could carry wide instructions into them.
#pragma once

#include <cstdint>

namespace qfx::cpu {

// Which caches a line of weights is fetched into ahead of its use: all, the second on, or the first
// alone.
enum Hint : int { kT0, kT1, kNta };
inline constexpr int kHints = 3;

// Parameters of one operand format. Each is legal by itself, so that a call may read some of them
// before and others after they are changed; gemm/tuning.h has their names and bounds.
struct Tuning {
  // K is cut into equal blocks of at most this. The weights of a block, 32 times as many bytes,
  // stay in the first cache while the rows of a block are read.
  int64_t block_depth = 512;
  // Rows are cut into equal blocks of at most this, rounded up to whole tiles. Their codes stay in
  // the second cache while the panels are streamed.
  int64_t block_rows = 240;
  // A block may have more rows than these where their codes take no more bytes than this.
  int64_t block_bytes = 0;
  // Up to so many rows the weights are streamed: K is not cut, and what lies `ahead` bytes on is
  // fetched with `hint`, from so many panels side by side as there are streams. Beyond, a tile of
  // each block fetches the next block.
  int64_t stream_rows = 2;
  int64_t hint = kT0;
  int64_t ahead = 4096;
  int64_t streams = 1;
  // With fewer rows the format below this one is used, if there is one.
  int64_t minimum_rows = 0;
  // Up to so many rows, codes of 4 and 5 bits become bytes in registers, anew for each tile of 8
  // rows; beyond, those of a panel are unpacked once for all rows.
  int64_t packed_rows = 16;
  // Codes of 4 and 5 bits are fetched at least so many bytes ahead where they are fetched into the
  // second cache: the fastest on a Zen 4 and on a Xeon with AMX.
  int64_t packed_ahead = 8192;
  // Weights of up to so many bytes stay in the second cache by themselves: strips fetch none ahead.
  int64_t near_bytes = 1280 << 10;
  // Outputs of so many bytes or more leave the caches before they are read: strips store them past
  // these, without reading what was there.
  int64_t far_bytes = int64_t{1} << 40;
  // Multiply-accumulates for which other threads are not woken: about 5 microseconds.
  int64_t serial_steps = 1 << 19;
};

}  // namespace qfx::cpu
