// AMX-INT8 in plain C++, put before a file that uses its intrinsics. Stricter than the processor
// needs to be, so that what would fault there ends the program here, with a sentence.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace qfx::emulated {

inline void demand(bool condition, const char* what) {
  if (condition) return;
  std::printf("AMX: %s\n", what);
  std::fflush(stdout);
  std::_Exit(1);
}

struct Tile {
  int rows = 0, bytes = 0;
  uint8_t data[16][64] = {};
  ~Tile() { demand(rows == 0, "a thread ends without having released its tile registers"); }
};
inline thread_local Tile tiles[8];

inline Tile& at(int tile) {
  demand(tiles[tile].rows > 0, "a tile register is used that is not configured");
  return tiles[tile];
}

inline void release() {
  for (Tile& tile : tiles) tile.rows = tile.bytes = 0;
}

inline void configure(const void* from) {
  uint8_t bytes[64];
  std::memcpy(bytes, from, 64);
  demand(bytes[0] == 1 && bytes[1] == 0, "the palette is not 1, or the first row not 0");
  for (int i = 0; i < 8; ++i) {
    const int rows = bytes[48 + i], width = bytes[16 + 2 * i] + 256 * bytes[17 + 2 * i];
    demand(rows <= 16 && width <= 64, "a tile register has more than 16 rows or 64 bytes a row");
    demand((rows == 0) == (width == 0), "a tile register has rows without bytes, or the reverse");
    tiles[i].rows = rows;
    tiles[i].bytes = width;
  }
  for (int i = 2; i < 64; ++i) {
    const bool reserved = i < 16 || (i >= 32 && i < 48) || i >= 56;
    demand(!reserved || bytes[i] == 0, "a reserved byte of the configuration is not 0");
  }
}

inline void load(int to, const void* from, int64_t stride) {
  Tile& tile = at(to);
  for (int r = 0; r < tile.rows; ++r) {
    std::memcpy(tile.data[r], static_cast<const char*>(from) + r * stride, tile.bytes);
  }
}

inline void store(int from, void* to, int64_t stride) {
  const Tile& tile = at(from);
  for (int r = 0; r < tile.rows; ++r) {
    std::memcpy(static_cast<char*>(to) + r * stride, tile.data[r], tile.bytes);
  }
}

inline void zero(int tile) { std::memset(at(tile).data, 0, sizeof(Tile::data)); }

// c[m][n] += sum_k a[m][k] b[k / 4][4 n + k % 4]
inline void multiply(int to, int left, int right) {
  Tile &c = at(to), &a = at(left), &b = at(right);
  demand(c.rows == a.rows && c.bytes == b.bytes && a.bytes == 4 * b.rows, "shapes differ");
  for (int m = 0; m < c.rows; ++m) {
    int32_t sums[16];
    std::memcpy(sums, c.data[m], sizeof(sums));
    for (int k = 0; k < a.bytes; ++k) {
      for (int n = 0; n < c.bytes / 4; ++n) {
        const int left_code = static_cast<int8_t>(a.data[m][k]);
        sums[n] += left_code * static_cast<int8_t>(b.data[k / 4][4 * n + k % 4]);
      }
    }
    std::memcpy(c.data[m], sums, sizeof(sums));
  }
}

}  // namespace qfx::emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#define _tile_loadconfig(from) qfx::emulated::configure(from)
#define _tile_release() qfx::emulated::release()
#define _tile_loadd(to, from, stride) qfx::emulated::load(to, from, stride)
#define _tile_stream_loadd(to, from, stride) qfx::emulated::load(to, from, stride)
#define _tile_stored(from, to, stride) qfx::emulated::store(from, to, stride)
#define _tile_zero(tile) qfx::emulated::zero(tile)
#define _tile_dpbssd(to, left, right) qfx::emulated::multiply(to, left, right)
