// Depthwise convolutions of floats: each channel by a kernel of its own. (C5)
#pragma once

#include "cpu/conv/geometry.h"
#include "cpu/gemm/pack.h"
#include "cpu/gemm/product.h"
#include "cpu/kernels/tables/depthwise.h"

namespace qfx::cpu {

// The taps of a line of a kernel that its weight has: whole quads, the last of which may be zero.
inline int64_t stored_taps(int64_t taps) { return round_up(taps, kQuadTaps); }

// to.data[row][c] of each window of one or two axes, whose last one has no dilation. x has its
// channels last, in float32. w [C, lines * stored taps]. `code`: of each channel of an image.
void depthwise(const Kernels& kernels, const Image& x, const Windows& of, const CodeSpec& code,
               const PackedWeight& w, const FloatOutput& to);

}  // namespace qfx::cpu
