#include "cpu/conv/convolution.h"

#include <algorithm>
#include <cstring>

#include "cpu/conv/im2col.h"
#include "cpu/conv/window_rows.h"
#include "cpu/core/scratch.h"

namespace qfx::cpu {
namespace {

constexpr int64_t kPieceBytes = 1 << 20;  // of windows at a time, where they are written to memory

// Whether windows are pixels that lie in memory as the rows of a matrix do.
bool are_rows(const Image& x, const Windows& of) { return of.are_pixels() && x.is_matrix(of); }

// Rows of a matrix, `stride` bytes apart.
template <typename Byte>
struct ByteRows {
  Byte* data;
  int64_t stride;
};

void copy_rows(const ByteRows<const char>& from, int64_t count, int64_t bytes,
               const ByteRows<char>& to) {
  for (int64_t m = 0; m < count; ++m) {
    std::memcpy(to.data + m * to.stride, from.data + m * from.stride, bytes);
  }
}

// Rows m, m + 1, ... of an output, one after the other where the product needs that.
class OutputRows {
 public:
  OutputRows(const Linear& linear, int64_t m, int64_t count, Scratch& scratch)
      : bytes_(linear.w.shape().n * linear.to.element()),
        stride_(linear.to.row_of(linear.w.shape()) * linear.to.element()),
        count_(count),
        there_(linear.to.data + m * stride_),
        out_(linear.to) {
    out_.data = there_;
    out_.residual = linear.to.residual_at(m * stride_);
    if (!are_apart(linear)) return;
    out_.stride = 0;
    out_.data = scratch.get<char>(2 * count * bytes_);
    if (out_.residual == nullptr) return;
    char* residual = out_.data + count * bytes_;
    copy_rows({out_.residual, stride_}, count, bytes_, {residual, bytes_});
    out_.residual = residual;
  }

  // Whether rows lie apart and the product, which has groups of K, cannot write them so.
  static bool are_apart(const Linear& linear) {
    return linear.to.row_of(linear.w.shape()) != linear.w.shape().n && !linear.w.one_scale();
  }

  const FloatOutput& out() const { return out_; }

  // Brings them to where they belong.
  void finish() const {
    if (out_.data != there_) copy_rows({out_.data, bytes_}, count_, bytes_, {there_, stride_});
  }

 private:
  const int64_t bytes_, stride_, count_;
  char* const there_;
  FloatOutput out_;
};

// Windows in memory, some at a time; all of them where one scale is for all, or where they are the
// pixels of the image.
void convolve_in_memory(const Kernels& kernels, const Image& x, const Windows& of,
                        const WindowCode& code, const Linear& linear) {
  thread_local Scratch scratch, apart;
  const bool pixels = are_rows(x, of), per_tensor = code.spec.per_tensor && code.group == 0;
  const int64_t rows = of.rows(), stride = pixels ? x.w : of.k(), row = of.k() * x.element();
  const bool at_once = per_tensor || (pixels && !OutputRows::are_apart(linear));
  const int64_t most = kPieceBytes / std::max<int64_t>(row, 1);
  const int64_t piece = at_once ? rows : std::clamp<int64_t>(most, 1, rows);
  char* windows = pixels ? nullptr : scratch.get<char>(piece * row);
  for (int64_t first = 0; first < rows; first += piece) {
    const int64_t count = std::min(piece, rows - first);
    if (!pixels) im2col(x, of, first, count, windows);
    const char* from = pixels ? x.data + first * stride * x.element() : windows;
    const FloatMatrix matrix = {from, x.dtype, count, of.k(), stride, code.transform};
    OutputRows to(linear, first, count, apart);
    const Linear all[] = {{linear.w, to.out()}};
    linears_of_floats(kernels, {matrix, code.spec, code.group}, all);
    to.finish();
  }
}

// Windows that are quantized where they are read.
void convolve_in_cache(const Kernels& kernels, const Image& x, const Windows& of,
                       const WindowCode& code, const Linear& linear) {
  thread_local Scratch scratch;
  const auto& [weight, to] = linear;
  const PackedWeight& w = weight.whole;
  float* scales = scratch.get<float>(of.rows());
  in_chunks(kernels, w, of.rows(), [&](int64_t first, int64_t count) {
    const WindowRows rows(kernels, w, {x, of, code.spec, code.transform}, first, count,
                          scales + first);
    gemm(rows, w, FloatSink(kernels, w, rows.rows, to, scales, 1, first));
  });
}

}  // namespace

void convolution(const Kernels& kernels, const Image& x, const Windows& of, const WindowCode& code,
                 const Linear& linear) {
  if (of.rows() == 0 || linear.w.shape().n == 0) return;
  const bool each_row = code.group == 0 && !code.spec.per_tensor;
  if (linear.w.one_scale() && each_row && of.k() > 0 && !are_rows(x, of)) {
    return convolve_in_cache(kernels, x, of, code, linear);
  }
  convolve_in_memory(kernels, x, of, code, linear);
}

}  // namespace qfx::cpu
