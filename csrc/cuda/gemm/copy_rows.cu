// Matrices moved into rows: copy_rows.h.
#include "cuda/core/warp.cuh"
#include "cuda/gemm/copy_rows.h"
#include "cuda/gemm/plan.h"

namespace qfx::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTurnTile = 64;

// out[i][k] = in[i][k], 0 from K on; i counts the rows of all matrices. 16 bytes a thread.
__global__ void __launch_bounds__(kThreads) pad(CodeLines in, RowSizes size, int8_t* out) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t chunks = size.pitch / 16, i = index / chunks, first = index % chunks * 16;
  if (i >= size.batch * size.rows) return;
  const int8_t* from = in.data + i / size.rows * in.batch_step + i % size.rows * in.step;
  alignas(16) int8_t bytes[16];
#pragma unroll
  for (int j = 0; j < 16; ++j) bytes[j] = first + j < size.k ? from[first + j] : int8_t{0};
  *reinterpret_cast<uint4*>(out + i * size.pitch + first) = *reinterpret_cast<const uint4*>(bytes);
}

// out[b][r][k] = in[b][k][r], 0 from K on: what is contiguous along r becomes so along k. A block
// turns 64 x 64 codes, each thread four at a time.
__global__ void __launch_bounds__(kThreads) turn(CodeLines in, RowSizes size, int8_t* out) {
  struct Staged {
    int8_t of[kTurnTile][kTurnTile + 4];  // [k][row]
  };
  Staged& staged = static_shared<Staged>();
  const int64_t across = (size.pitch + kTurnTile - 1) / kTurnTile;
  const int64_t down = (size.rows + kTurnTile - 1) / kTurnTile;
  const int64_t first_k = blockIdx.x % across * kTurnTile;
  const int64_t first_row = blockIdx.x / across % down * kTurnTile;
  const int64_t batch = blockIdx.x / (across * down);
  const int x = static_cast<int>(threadIdx.x) % 16 * 4, y = static_cast<int>(threadIdx.x) / 16;
  const int8_t* from = in.data + batch * in.batch_step;
  for (int i = y; i < kTurnTile; i += kThreads / 16) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t row = first_row + x + j;
      const bool there = first_k + i < size.k && row < size.rows;
      staged.of[i][x + j] = there ? from[(first_k + i) * in.step + row] : int8_t{0};
    }
  }
  __syncthreads();
  int8_t* to = out + batch * size.rows * size.pitch;
  for (int i = y; i < kTurnTile; i += kThreads / 16) {
    if (first_row + i >= size.rows || first_k + x >= size.pitch) continue;
    uint32_t four = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      four |= uint32_t{static_cast<uint8_t>(staged.of[x + j][i])} << 8 * j;
    *reinterpret_cast<uint32_t*>(to + (first_row + i) * size.pitch + first_k + x) = four;
  }
}

// out[r][c] = in[c * step + r]: a block turns 64 x 64 elements.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    turn_elements(const T* in, int64_t step, int64_t rows, int64_t columns, T* out) {
  struct Staged {
    T of[kTurnTile][kTurnTile + 4 / sizeof(T)];  // [column][row], an odd number of words
  };
  Staged& staged = static_shared<Staged>();
  const int64_t across = (columns + kTurnTile - 1) / kTurnTile;
  const int64_t first_column = blockIdx.x % across * kTurnTile;
  const int64_t first_row = blockIdx.x / across * kTurnTile;
  const int x = static_cast<int>(threadIdx.x) % kTurnTile;
  const int y = static_cast<int>(threadIdx.x) / kTurnTile;
  for (int i = y; i < kTurnTile; i += kThreads / kTurnTile) {
    if (first_column + i >= columns || first_row + x >= rows) continue;
    staged.of[i][x] = load_once(in + (first_column + i) * step + first_row + x);
  }
  __syncthreads();
  for (int i = y; i < kTurnTile; i += kThreads / kTurnTile) {
    if (first_row + i >= rows || first_column + x >= columns) continue;
    out[(first_row + i) * columns + first_column + x] = staged.of[x][i];
  }
}

template <typename T>
void turn_of(const void* in, int64_t step, int64_t rows, int64_t columns, void* out,
             Stream stream) {
  const int64_t tiles = ceil_div(rows, kTurnTile) * ceil_div(columns, kTurnTile);
  if (tiles == 0) return;
  launch(turn_elements<T>, dim3(static_cast<unsigned>(tiles)), dim3(kThreads), 0, stream,
         static_cast<const T*>(in), step, rows, columns, static_cast<T*>(out));
}

// sums[i] = sum_k codes[i][k], a warp for each row.
__global__ void __launch_bounds__(kThreads) sum(CodeLines codes, RowSizes size, int32_t* sums) {
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  if (i >= size.batch * size.rows) return;
  const int8_t* row = codes.data + i / size.rows * codes.batch_step + i % size.rows * codes.step;
  int32_t sum = 0;
  for (int64_t k = threadIdx.x % 32 * 4; k < size.pitch; k += 128) {
    sum = __dp4a(*reinterpret_cast<const int*>(row + k), 0x01010101, sum);
  }
  sum = sum_of_warp(sum);
  if (threadIdx.x % 32 == 0) sums[i] = sum;
}

}  // namespace

void pad_codes(const CodeLines& in, const RowSizes& size, int8_t* out, Stream stream) {
  const int64_t chunks = size.batch * size.rows * size.pitch / 16;
  if (chunks == 0) return;
  launch(pad, dim3(static_cast<unsigned>(ceil_div(chunks, kThreads))), dim3(kThreads), 0, stream,
         in, size, out);
}

void turn_codes(const CodeLines& in, const RowSizes& size, int8_t* out, Stream stream) {
  const int64_t tiles = ceil_div(size.pitch, kTurnTile) * ceil_div(size.rows, kTurnTile);
  if (size.batch * tiles == 0) return;
  launch(turn, dim3(static_cast<unsigned>(size.batch * tiles)), dim3(kThreads), 0, stream, in, size,
         out);
}

void turn_floats(const void* in, Dtype dtype, int64_t step, int64_t rows, int64_t columns,
                 void* out, Stream stream) {
  const auto turned = dtype == Dtype::kFloat32 ? turn_of<uint32_t> : turn_of<uint16_t>;
  turned(in, step, rows, columns, out, stream);
}

void sum_codes(const CodeLines& codes, const RowSizes& size, int32_t* sums, Stream stream) {
  const int64_t warps = size.batch * size.rows;
  if (warps == 0) return;
  launch(sum, dim3(static_cast<unsigned>(ceil_div(warps * 32, kThreads))), dim3(kThreads), 0,
         stream, codes, size, sums);
}

}  // namespace qfx::cuda
