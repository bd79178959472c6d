// The Hopper kernels by name (kernels.inc) and what follows from a configuration.
#pragma once

#include "cuda/gemm/plan.h"

namespace qfx::cuda::sm90 {

inline constexpr int kWarpgroup = 128;   // threads that issue one wgmma together
inline constexpr int kTileBytes = 128;   // of K in a row of a tile, the span of the swizzle
inline constexpr int kTileAlign = 1024;  // bytes after which the swizzle repeats

enum class Operands { kCodes, kBits };

// One kernel computes left[left_rows][K] right[right_rows][K]^T in tiles of left x right. The left
// operand of wgmma has 64 rows, the right one 8 to 256: for few tokens the weight is the left one.
struct Config {
  Operands operands;
  int left, right;
  int stages;      // tiles of 128 bytes of K in flight
  int warpgroups;  // that share a tile
  int groups;  // of warpgroups, on tiles of their own in turns: one stores while another multiplies
  bool swap;   // the weight is the left operand
  int cluster = 1;  // blocks whose left tiles follow each other, and that load a right one together

  constexpr int blocks() const { return left / 64 / warpgroups; }  // of 64 rows, per warpgroup
  constexpr int consumers() const { return warpgroups * groups; }
  constexpr int threads() const { return kWarpgroup * (consumers() + 1); }
  constexpr int stage_bytes() const { return (left + right) * kTileBytes; }

  // A warp hands its accumulators to the epilogue in pieces of rows x columns of the output.
  constexpr int piece_rows() const { return swap ? right : 16; }
  constexpr int piece_columns() const { return swap ? 16 : 64; }
  constexpr int piece_pitch() const { return swap ? 20 : 64; }  // int32s; against bank conflicts
  constexpr int pieces() const { return swap ? blocks() : blocks() * right / 64; }
  constexpr int piece_bytes() const { return piece_rows() * piece_pitch() * 4; }

  constexpr int shared_bytes() const {  // the tiles, the warps' pieces, the barriers
    return stages * stage_bytes() + 4 * consumers() * piece_bytes() + (2 * stages + groups) * 8;
  }
};

// The tiles of one matrix. In a cluster every block has one, if only outside of the matrix.
constexpr TileGrid grid_of(const Config& c, const Sizes& s) {
  return {static_cast<unsigned>(ceil_div(c.swap ? s.n : s.m, c.left * c.cluster) * c.cluster),
          static_cast<unsigned>(ceil_div(c.swap ? s.m : s.n, c.right))};
}

constexpr int64_t tile_count(const Config& c, const Sizes& s) {
  return s.batch * grid_of(c, s).down * grid_of(c, s).across;
}

// k_s8_128x256 and so on.
#define QFX_S8(name, ...) inline constexpr Config k_##name = {Operands::kCodes, __VA_ARGS__};
#define QFX_B1(name, ...) inline constexpr Config k_##name = {Operands::kBits, __VA_ARGS__};
#include "cuda/sm90/kernels.inc"
#undef QFX_S8
#undef QFX_B1

}  // namespace qfx::cuda::sm90
