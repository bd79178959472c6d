// Float activations times weights of 4 and 5 bits, made for a few rows: the codes are read as they
// are stored and become floats in registers. 16-bit activations are multiplied on tensor cores,
// which read a weight once for 16 rows; float32 without them, once for 8 rows.
//     y[m][n] = act(sum_k x[m][k] w^[n][k] + bias[n]),   w^ by (Q14)       (W4)
#pragma once

#include "cuda/gemm/gemm.h"

namespace qfx::cuda {

// Rows of x up to which these kernels run, though the weight is then read several times. More rows
// are a float matmul of lowbit_values: on an H200 both take the same time at about 64 rows.
inline constexpr int64_t kFewLowbitRows = 64;

// What the codes are shifted by, as a header says it.
enum class Shift : unsigned { kNone, kZeroPoints, kMinimums };

// A packed weight (qfx/ops/lowbit_packing.py). The host knows its sizes; what only its header says
// is read by the kernel.
struct LowbitWeight {
  static constexpr int kPanel = 32, kHeaderBytes = 128;
  static constexpr int kShiftWord = 3, kScalesWord = 4;  // of the header: a Shift, a Dtype

  const uint8_t* bytes;  // aligned to 16
  int64_t n, groups;     // of K
  int bits, group;       // 4 or 5; 32, 64 or 128
  int front, block;      // bytes of a panel before its groups, and of a group
  int64_t panel;         // bytes

  // Of a weight with `shift_bytes` for the shift of each column and group.
  static LowbitWeight of(const void* bytes, int64_t n, int64_t k, int64_t bits, int64_t group,
                         int shift_bytes) {
    constexpr int64_t kLine = 64;
    const int64_t groups = ceil_div(k, group);
    const int64_t front = ceil_div(groups * kPanel * shift_bytes, kLine) * kLine;
    const int64_t block = kPanel * (2 + group / 2 + (bits == 5 ? group / 8 : 0));
    return {static_cast<const uint8_t*>(bytes),
            n,
            groups,
            static_cast<int>(bits),
            static_cast<int>(group),
            static_cast<int>(front),
            static_cast<int>(block),
            front + groups * block};
  }

  int64_t panels() const { return ceil_div(n, kPanel); }
  int64_t size() const { return kHeaderBytes + panels() * panel; }
};

struct LowbitOnly {
  const void* x;  // [rows][k]
  Dtype x_dtype;
  int64_t rows, n, k;
  LowbitWeight w;
  AnyFloats bias;
  Activation activation;
  Dtype dtype;
  void* y;
};

// Whether there is a kernel for so many rows of x, on a GPU of this capability.
bool has_lowbit_kernel(Dtype x, int64_t rows, int capability);

void lowbit_linear(const LowbitOnly& problem, int multiprocessors, Stream stream);

// values[n][k] = w^[n][k] by (Q14), rounded once to `dtype`. Nothing waits for the GPU.
void lowbit_values(const LowbitWeight& w, int64_t k, Dtype dtype, void* values, Stream stream);

}  // namespace qfx::cuda
