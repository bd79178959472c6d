#include <algorithm>

#include "cpu/attention/cache_rows.h"
#include "cpu/core/parallel.h"
#include "cpu/core/scratch.h"

namespace qfx::cpu {
namespace {

// What is to be done: tiles of the rows of each head, and the parts of the tokens for each tile.
class CacheWork {
 public:
  CacheWork(const Kernels& kernels, const CacheAttention& a)
      : kernels_(kernels),
        a_(a),
        rows_(a.group * a.q.tokens),
        tile_rows_(CacheRows(kernels, a, rows_).rows()),
        tiles_of_head_((rows_ + tile_rows_ - 1) / tile_rows_),
        parts_((a.length + kPart - 1) / kPart),
        width_(round_up(a.values.d, kPanel)) {}

  void run() const {
    const int64_t all = tiles(), scores = a_.keys.batch * a_.keys.heads * rows_ * a_.length;
    const int64_t threads = threads_for(scores * (a_.keys.d + a_.values.d));
    if (parts_ > 1 && all % threads != 0 && all < 4 * threads) return run_in_parts(threads);
    const int64_t shares = std::min(threads, all);
    on_threads(shares, [&](int64_t i) { attend(i * all / shares, (i + 1) * all / shares); });
  }

 private:
  int64_t tiles() const { return a_.keys.batch * a_.keys.heads * tiles_of_head_; }

  void load(int64_t tile, CacheRows* rows) const {
    const int64_t first = tile % tiles_of_head_ * tile_rows_;
    rows->load(tile / tiles_of_head_, first, count(tile));
  }
  int64_t count(int64_t tile) const {
    return std::min(tile_rows_, rows_ - tile % tiles_of_head_ * tile_rows_);
  }

  // The next `rows` rows of partial results in a piece of memory.
  int64_t floats_of(int64_t rows) const { return rows * (3 + width_); }
  CachePartial partial_at(float* memory, int64_t rows) const {
    return {reinterpret_cast<CacheSums*>(memory + rows * width_), memory};
  }

  void merge(const CachePartial& part, int64_t count, const CachePartial& all) const {
    for (int64_t r = 0; r < count; ++r) {
      const CacheMergeArgs args = {part.sums[r], part.y + r * width_, a_.values.d, all.sums + r,
                                   all.y + r * width_};
      kernels_.attention->cache.merge(&args);
    }
  }

  // Whole rows of tiles begin..end.
  void attend(int64_t begin, int64_t end) const {
    thread_local Scratch scratch;
    float* memory = scratch.get<float>(2 * floats_of(tile_rows_));
    const CachePartial part = partial_at(memory, tile_rows_);
    const CachePartial all = partial_at(memory + floats_of(tile_rows_), tile_rows_);
    CacheRows rows(kernels_, a_, rows_);
    CacheCodes codes(kernels_, a_, tiles_of_head_ > 1);
    int64_t head = -1;
    for (int64_t tile = begin; tile < end; ++tile) {
      if (head != tile / tiles_of_head_) codes.start(head = tile / tiles_of_head_);
      load(tile, &rows);
      std::fill_n(memory + floats_of(tile_rows_), floats_of(tile_rows_), 0.f);
      for (int64_t p = 0; p < parts_; ++p) {
        rows.attend(codes, p, part);
        merge(part, count(tile), all);
      }
      rows.store(all);
    }
  }

  // Each part of each tile by itself, on any thread; then a tile's parts in their order.
  void run_in_parts(int64_t threads) const {
    thread_local Scratch scratch;
    const int64_t pieces = tiles() * parts_, size = floats_of(tile_rows_);
    float* memory = scratch.get<float>(pieces * size);
    const int64_t shares = std::min(threads, pieces);
    on_threads(shares, [&](int64_t i) {
      attend_parts(i * pieces / shares, (i + 1) * pieces / shares, memory);
    });
    CacheRows rows(kernels_, a_, rows_);
    float* whole = own_memory();
    for (int64_t tile = 0; tile < tiles(); ++tile) {
      std::fill_n(whole, size, 0.f);
      const CachePartial all = partial_at(whole, tile_rows_);
      for (int64_t p = 0; p < parts_; ++p) {
        merge(partial_at(memory + (tile * parts_ + p) * size, tile_rows_), count(tile), all);
      }
      load(tile, &rows);
      rows.store(all);
    }
  }

  float* own_memory() const {
    thread_local Scratch scratch;
    return scratch.get<float>(floats_of(tile_rows_));
  }

  void attend_parts(int64_t begin, int64_t end, float* memory) const {
    CacheRows rows(kernels_, a_, rows_);
    CacheCodes codes(kernels_, a_, tiles_of_head_ > 1);
    int64_t loaded = -1;
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t tile = piece / parts_, head = tile / tiles_of_head_;
      if (loaded < 0 || head != loaded / tiles_of_head_) codes.start(head);
      if (tile != loaded) load(loaded = tile, &rows);
      rows.attend(codes, piece % parts_,
                  partial_at(memory + piece * floats_of(tile_rows_), tile_rows_));
    }
  }

  const Kernels& kernels_;
  const CacheAttention& a_;
  const int64_t rows_, tile_rows_, tiles_of_head_, parts_, width_;
};

}  // namespace

void attend_to_cache(const Kernels& kernels, const CacheAttention& a) {
  if (a.keys.batch * a.keys.heads * a.group * a.q.tokens == 0) return;
  CacheWork(kernels, a).run();
}

}  // namespace qfx::cpu
