// What becomes of a tile of sums: integers, floats by (E1) or (E3), or codes by (Q6). A tile is in
// shared memory, where stage_tile has put it, so the loops here are few and short, and each is
// compiled for its activation and type.
#pragma once

#include "cuda/gemm/elements.cuh"
#include "cuda/gemm/tiles.cuh"
#include "cuda/rows/codes.cuh"
#include "cuda/rows/epilogue.cuh"

namespace qfx::cuda {

// --- what a raw sum stands for ---

// exact = raw - zero_m colsum_n, of codes. (G1)
struct CodeSums : CodeTerms {
  using Multiply = MultiplyCodes;
  using Element = int32_t;
  static constexpr bool kToCodes = true, kToIntegers = true;

  __device__ int32_t row_term(int64_t row) const { return at(zero, row); }
  __device__ float row_scale(const Output& out, int64_t row) const {
    return at(out.row_scale, row);
  }
  __device__ int32_t column_term(int64_t batch, int64_t n) const {
    return colsum[batch * colsum_step + n];
  }
  __device__ int32_t exact(int32_t raw, int32_t row, int32_t column) const {
    return static_cast<int32_t>(static_cast<uint32_t>(raw) -
                                static_cast<uint32_t>(row) * static_cast<uint32_t>(column));
  }
  __device__ float scaled(int32_t raw, int32_t row, float row_scale, int32_t column,
                          float col_scale) const {
    return static_cast<float>(exact(raw, row, column)) * (row_scale * col_scale);  // (E1)
  }
};

// exact = sum of K products of signs. (H1) (H2)
struct SignSums : SignTerms {
  using Multiply = MultiplyBits;
  using Element = int32_t;
  static constexpr bool kToCodes = false, kToIntegers = true;

  __device__ int32_t row_term(int64_t row) const { return set_in_row[row]; }
  __device__ float row_scale(const Output& out, int64_t row) const {
    return at(out.row_scale, row);
  }
  __device__ int32_t column_term(int64_t, int64_t n) const { return set_in_column[n]; }
  __device__ int32_t exact(int32_t raw, int32_t row, int32_t column) const {
    return sum_of_signs(raw, k, static_cast<uint32_t>(row), static_cast<uint32_t>(column));
  }
  __device__ float scaled(int32_t raw, int32_t row, float row_scale, int32_t column,
                          float col_scale) const {
    return static_cast<float>(exact(raw, row, column)) * (row_scale * col_scale);
  }
};

// Floats that groups of K have added up. (E3)
struct GroupSums {
  using Element = float;
  static constexpr bool kToCodes = false, kToIntegers = false;

  __device__ int32_t row_term(int64_t) const { return 0; }
  __device__ float row_scale(const Output&, int64_t) const { return 1.f; }
  __device__ int32_t column_term(int64_t, int64_t) const { return 0; }
  __device__ float scaled(float sum, int32_t, float, int32_t, float) const { return sum; }
};

// --- the loops ---

// Four columns of a tile.
struct Columns {
  int64_t n;
  int count;  // that exist; 0 or less beyond the last
  int32_t term[4];
  float scale[4], bias[4];

  template <class Sums>
  __device__ static Columns of(const Sums& sums, const Output& out, int64_t batch, int64_t n,
                               int64_t end) {
    Columns c = {n, static_cast<int>(end - n < 4 ? end - n : 4), {}, {}, {}};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= c.count) break;
      c.term[i] = sums.column_term(batch, n + i);
      if (out.col_scale != nullptr) c.scale[i] = out.col_scale[batch * out.col_step + n + i];
      if (out.bias.data != nullptr) c.bias[i] = load_float(out.bias.data, out.bias.dtype, n + i);
    }
    return c;
  }
};

// What a row of sums is finished with.
struct RowTerms {
  int32_t term;
  float scale;

  template <class Sums>
  __device__ static RowTerms of(const Sums& sums, const Output& out, int64_t row) {
    return {sums.row_term(row), out.row_scale.data == nullptr ? 0.f : sums.row_scale(out, row)};
  }
  __device__ RowTerms of_lane(int lane) const {
    return {__shfl_sync(kAllLanes, term, lane), __shfl_sync(kAllLanes, scale, lane)};
  }
};

// f(row, terms, raw) for each row of the tile that exists, four columns a thread.
template <class T, class Sums, class F>
__device__ __forceinline__ void for_rows(const typename Sums::Element* staged,
                                         const TilePlace& place, const Sizes& size,
                                         const Sums& sums, const Output& out, int column,
                                         const F& f) {
  constexpr int kRowsAtOnce = T::kThreads / (T::kN / 4), kLanes = 32;
  const int first = T::thread() / (T::kN / 4);
  const int rows = static_cast<int>(size.m - place.m < T::kM ? size.m - place.m : T::kM);
  const int64_t row = place.batch * size.m + place.m;
  const bool exists = place.n + column < size.n;
  const auto raw = [&](int r) {
    return *reinterpret_cast<const Four<typename Sums::Element>*>(staged + T::at(r, column));
  };
  if constexpr (T::kThreads == kLanes && T::kM >= kLanes) {
    // A warp's own tile: it reads the terms of 32 rows at once, a row a lane, and hands them round.
#pragma unroll 1
    for (int base = 0; base < rows; base += kLanes) {
      const int lane = base + T::thread(), count = rows - base < kLanes ? rows - base : kLanes;
      const RowTerms all = RowTerms::of(sums, out, row + (lane < rows ? lane : base));
#pragma unroll 1
      for (int i = 0; i < count; i += kRowsAtOnce) {
        const RowTerms terms = all.of_lane(i + first);
        if (exists && i + first < count) f(row + base + i + first, terms, raw(base + i + first));
      }
    }
  } else {
    if (!exists) return;
#pragma unroll 1
    for (int r = first; r < rows; r += kRowsAtOnce) {
      f(row + r, RowTerms::of(sums, out, row + r), raw(r));
    }
  }
}

__device__ __forceinline__ RowCode code_at(const CodesOut& codes, int64_t row) {
  const int32_t zero = codes.zero_point.data == nullptr ? 0 : at(codes.zero_point, row);
  return code_with(codes.spec, at(codes.scale, row), zero);
}

// Four codes of a row, (Q6). What is not finite is remembered for settle_codes.
__device__ __forceinline__ void store_codes(const CodesOut& codes, int8_t* to, int64_t row,
                                            const float (&y)[4], int count, bool whole) {
  const RowCode code = code_at(codes, row);
  int32_t q[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    q[i] = code_for(code, y[i]);
    const int32_t magnitude = __float_as_int(fabsf(y[i]));
    if (i < count && magnitude >= kInfinity) atomicMax(codes.faults + row, magnitude);
  }
  store_four(to, q, count, whole);
}

template <class T, class Sums>
__device__ __forceinline__ void finish_tile(const typename Sums::Element* staged,
                                            const TilePlace& place, const Sizes& size,
                                            const Sums& sums, const Output& out) {
  const int column = T::thread() % (T::kN / 4) * 4;
  const Columns c = Columns::of(sums, out, place.batch, place.n + column, size.n);
  const bool whole = size.n % 4 == 0;
  using Raw = Four<typename Sums::Element>;
  if constexpr (Sums::kToIntegers) {
    if (out.type == OutType::kIntegers) {
      int32_t* to = static_cast<int32_t*>(out.data) + c.n;
      const auto store = [&](int64_t row, const RowTerms& terms, const Raw& raw) {
        int32_t v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = sums.exact(raw.of[i], terms.term, c.term[i]);
        store_four(to + row * size.n, v, c.count, whole);
      };
      return for_rows<T>(staged, place, size, sums, out, column, store);
    }
  }
  const bool has_bias = out.bias.data != nullptr;
  with_activation(out.activation, [&](auto activation) {
    constexpr Activation kActivation = decltype(activation)::value;
    const auto values = [&](const RowTerms& terms, const Raw& raw, float (&y)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float v = sums.scaled(raw.of[i], terms.term, terms.scale, c.term[i], c.scale[i]);
        y[i] = activate<kActivation>(has_bias ? v + c.bias[i] : v);
      }
    };
    if constexpr (Sums::kToCodes) {
      if (out.type == OutType::kCodes) {
        int8_t* to = static_cast<int8_t*>(out.data) + c.n;
        const auto store = [&](int64_t row, const RowTerms& terms, const Raw& raw) {
          float y[4];
          values(terms, raw, y);
          store_codes(out.codes, to + row * size.n, row, y, c.count, whole);
        };
        return for_rows<T>(staged, place, size, sums, out, column, store);
      }
    }
    with_type(out.dtype, [&](auto zero) {
      using Y = decltype(zero);
      Y* to = static_cast<Y*>(out.data) + c.n;
      const auto store = [&](int64_t row, const RowTerms& terms, const Raw& raw) {
        float y[4];
        values(terms, raw, y);
        store_four(to + row * size.n, y, c.count, whole);
      };
      for_rows<T>(staged, place, size, sums, out, column, store);
    });
  });
}

}  // namespace qfx::cuda
