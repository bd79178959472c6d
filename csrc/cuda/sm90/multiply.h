// The products of cuda/gemm/gemm.h by a Hopper kernel, which choice.h names with its parts of K.
#pragma once

#include "cuda/gemm/gemm.h"
#include "cuda/sm90/choice.h"

namespace qfx::cuda::sm90 {

// Whether tensor maps can describe the operands of a product. The matrices of a batch must follow
// each other in whole rows.
bool can_read(const Sizes& size, const Rows& a, const Rows& w);

// int32 values of memory that a choice needs for the parts of K; 0 for one part.
int64_t part_values(const Sizes& size, const Choice& choice);

// `parts` are part_values() zeros; null will do for none.
void multiply_codes(const Sizes& size, const Rows& a, const Rows& w, const CodeTerms& terms,
                    const Output& out, const Choice& choice, int32_t* parts, int multiprocessors,
                    Stream stream);

void multiply_signs(const Sizes& size, const Rows& a, const Rows& w, const SignTerms& terms,
                    const Output& out, const Choice& choice, int32_t* parts, int multiprocessors,
                    Stream stream);

}  // namespace qfx::cuda::sm90
