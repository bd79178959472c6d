#include "cpu/gemm/group_panel.h"

#include <algorithm>

namespace qfx::cpu {
namespace {

constexpr int64_t kGroupsAtOnce = 8;  // whose raw tiles wait in L1

int32_t* raw_for(const GroupedRows& rows, const RowBlock& block, PanelMemory& memory) {
  if (rows.tiles != nullptr) return nullptr;
  const int64_t count = std::max<int64_t>(block.rows(), kGroupsAtOnce * kMaxTileRows);
  return memory.raw.get<int32_t>(count * kPanel);
}

// All of K of a stream of weights, or what stays in the first cache.
int64_t most_of(const GroupedRows& rows, const Passage& how, const PanelReader& reader) {
  if (reader.in_order()) return how.block;
  return std::min(how.block, even_part(how.depth, rows.rows.tuning.block_depth, kKMultiple));
}

}  // namespace

GroupedPanel::GroupedPanel(const Kernels& kernels, const GroupedRows& rows, const RowBlock& block,
                           PanelReader& reader, PanelMemory& memory)
    : kernels_(kernels),
      rows_(rows),
      w_(rows.w),
      block_(block),
      reader_(reader),
      how_(passage_of(rows.rows, w_, block.rows())),
      most_(most_of(rows, how_, reader)),
      raw_(raw_for(rows, block, memory)),
      sums_(memory.sums.get<float>(block.rows() * kPanel)) {}

float* GroupedPanel::run() {
  std::fill_n(sums_, block_.rows() * kPanel, 0.f);
  for (int64_t next; begin_ < how_.depth; begin_ = next) {
    next = end_of_block(begin_);
    now_ = reader_.read(begin_, next);
    for (int64_t m = block_.begin; m < block_.end; m += how_.height) {
      const int count = static_cast<int>(std::min(how_.height, block_.end - m));
      const bool fetch = reader_.in_order() && m - block_.begin == how_.fetching;
      if (rows_.tiles != nullptr) {
        add_in_tile(fetch, m, count, begin_, next);
      } else {
        add_raw(fetch ? how_.fetching_tiles[count - 1] : rows_.rows.format->tiles[count - 1], m,
                count, begin_, next);
      }
    }
  }
  return sums_;
}

// Whole groups, or for raw tiles a part of one.
int64_t GroupedPanel::end_of_block(int64_t k) const {
  const bool parts = rows_.tiles == nullptr && w_.group > most_;
  if (parts) return std::min({k + most_, (k / w_.group + 1) * w_.group, how_.depth});
  const int64_t groups = std::max<int64_t>(most_ / w_.group, 1);
  return std::min(k + groups * w_.group, how_.depth);
}

const int8_t* GroupedPanel::ahead_of(int64_t begin, int64_t end) const {
  const int64_t distance = how_.streams ? rows_.rows.tuning.ahead : (end - begin) * kPanel;
  return now_.b + distance;
}

GroupTerms GroupedPanel::terms_of(int64_t m, int64_t g) const {
  const int64_t at = g * rows_.rows.count + m, here = g - begin_ / w_.group;
  const PanelValues<float> scale = now_.scale.from(here);
  const PanelValues<int32_t> zero = now_.zero.from(here);
  return {rows_.add + at,
          rows_.mul + at,
          rows_.sum + at,
          rows_.pair == nullptr ? nullptr : rows_.pair + at,
          rows_.scale + at,
          rows_.rows.count,
          now_.colsum + here * kPanel,
          scale.data,
          scale.step,
          zero.data,
          zero.step,
          sums_ + (m - block_.begin) * kPanel};
}

GroupTileFn GroupedPanel::tile_of(bool fetch, int count) const {
  const GroupTiles& tiles = *rows_.tiles;
  const int zeros = rows_.pair != nullptr;
  if (!fetch) return tiles.tiles[zeros][count - 1];
  const bool by_hint = how_.streams && block_.rows() <= rows_.rows.format->few.rows;
  if (!by_hint) return tiles.prefetching[zeros][count - 1];
  return tiles.few[zeros][hint_for(rows_.rows.tuning, block_.rows())][count - 1];
}

// Adds the products of k in [begin, end), whole groups, to the sums of rows m...
void GroupedPanel::add_in_tile(bool fetch, int64_t m, int count, int64_t begin, int64_t end) const {
  const Format& format = *rows_.rows.format;
  const GroupTileFn tile = tile_of(fetch, count);
  const int64_t g = begin / w_.group, whole = (end - begin) / w_.group;
  GroupTile here = {count,
                    rows_.rows.a + m * rows_.rows.stride + begin * format.bytes_per_code,
                    rows_.rows.stride,
                    now_.b,
                    whole,
                    w_.group,
                    ahead_of(begin, end),
                    format.mul_offset,
                    terms_of(m, g)};
  if (whole > 0) tile(here);
  const int64_t taken = whole * w_.group, rest = end - begin - taken;
  if (rest == 0) return;
  here.a += taken * format.bytes_per_code;
  here.b += taken * kPanel;
  here.ahead += taken * kPanel;
  here.groups = 1;
  here.depth = rest;
  here.terms = terms_of(m, g + whole);
  tile(here);
}

// The same of groups or a part of one, once it is complete.
void GroupedPanel::add_raw(TileFn tile, int64_t m, int count, int64_t begin, int64_t end) const {
  const Format& format = *rows_.rows.format;
  const uint8_t* a = rows_.rows.a + m * rows_.rows.stride;
  const int8_t *b = now_.b, *ahead = ahead_of(begin, end);
  int32_t* raw = raw_ + (w_.group > most_ ? (m - block_.begin) * kPanel : 0);
  int64_t g = begin / w_.group;
  bool started = begin > g * w_.group;
  for (int64_t k = begin; k < end;) {
    int64_t groups = 0;
    for (; groups < kGroupsAtOnce && k < end; ++groups, started = false) {
      const int64_t next = std::min(end, (g + groups + 1) * w_.group), from = (k - begin) * kPanel;
      tile(a + k * format.bytes_per_code, rows_.rows.stride, b + from, (next - k) / kGroup,
           ahead + from, raw + groups * count * kPanel, started);
      k = next;
    }
    const bool complete = k == how_.depth || k == (g + groups) * w_.group;
    const GroupTerms terms = terms_of(m, g);
    if (complete) kernels_.sums->add_groups(raw, groups, count, &terms);
    g += groups;
  }
}

void finish_sums(const Kernels& kernels, const FinishedPanel& of, const FloatOutput& to,
                 const float* sums) {
  static constexpr float kScaled = 1;  // by their groups
  // Not made again for each panel: the kernel would wait for what was just stored in small parts.
  static constexpr FloatPanel kPlain = plain_panel();
  const int64_t n = of.w.n;
  const int columns = columns_of(of.w, of.p), rows = static_cast<int>(of.rows);
  FloatPanel with_bias;
  if (to.bias != nullptr) {
    with_bias = kPlain;
    with_bias.has_bias = true;
    std::copy_n(to.bias + of.p * kPanel, columns, with_bias.bias);
  }
  const FloatPanel& panel = to.bias == nullptr ? kPlain : with_bias;
  const int64_t at = (of.first * n + of.p * kPanel) * to.element();
  const bool past = of.past_caches && columns == kPanel;
  const FloatEpilogueArgs args = {
      sums,          rows,     columns,      &kScaled, 0,    &panel,
      to.activation, to.dtype, to.data + at, n,        past, to.residual_at(at)};
  kernels.sums->finish_floats(&args);
}

}  // namespace qfx::cpu
