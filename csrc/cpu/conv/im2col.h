// The windows of an image as the rows of a matrix. (C1)
#pragma once

#include "cpu/conv/geometry.h"

namespace qfx::cpu {

// Rows first, first + 1, ... of the windows, in the dtype of the image, one after the other.
void im2col(const Image& x, const Windows& of, int64_t first, int64_t count, char* out);

}  // namespace qfx::cpu
