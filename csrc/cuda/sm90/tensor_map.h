// Tensor maps, by which Hopper's copy engine reads tiles.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace qfx::cuda::sm90 {

// bytes[matrix][row][k] at data[matrix * step + row * pitch + k]; data, pitch and step are
// multiples of 16, no size is 0.
struct TileSource {
  const void* data;
  int64_t k_bytes, rows, matrices, pitch, step;
};

// Boxes of `tile_rows` rows by kTileBytes of K, swizzled by 128 bytes; zeros beyond k_bytes and
// rows.
CUtensorMap tile_map(const TileSource& from, int tile_rows);

}  // namespace qfx::cuda::sm90
