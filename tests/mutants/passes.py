"""Defects of the extension's checks of operands, its packing, and its passes over rows."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

CHECKS = (
    Mutant(
        "a rotation that does not divide K is taken",
        old="STD_TORCH_CHECK(rotation == 0 || k % rotation == 0,",
        new="STD_TORCH_CHECK(rotation == 0 || k >= 0,",
        tests=("test_error_sentence[op_errors]",),
    ),
    Mutant(
        "batches of other sizes are multiplied",
        old=" && std::equal(a.sizes().begin(), last, b.sizes().begin())",
        new="",
        tests=("test_error_sentence[op_bmm]",),
    ),
    Mutant(
        "a packed weight that is too long is read",
        old="expected = size_of(header); size != expected) {",
        new="expected = size_of(header); size < expected) {",
        tests=("test_error_sentence[op_errors]", "test_nonsense_raises_python_exceptions_only"),
    ),
    Mutant(
        "codes of 4 bits are unpacked in the wrong half",
        old="(nibbles[i] & 15) | high[0][i], up = (nibbles[i] >> 4) | high[1][i];",
        new="(nibbles[i] >> 4) | high[0][i], up = (nibbles[i] & 15) | high[1][i];",
        tests=("test_every_instruction_set_and_form_has_the_same_bits",),
        isa="ref",
    ),
    Mutant(
        "minimums of groups count once for all rows",
        old="minimums.add(g, static_cast<float>(rows_.sum[at]), rows_.scale[at],",
        new="minimums.add(g, static_cast<float>(rows_.sum[g]), rows_.scale[at],",
        tests=(
            "test_is_exact_where_float32_is",
            "test_every_instruction_set_and_form_has_the_same_bits",
        ),
    ),
    Mutant(
        "a weight packed for another N is read",
        old="STD_TORCH_CHECK(shape.n == known.n, op,",
        new="STD_TORCH_CHECK(shape.n >= known.n, op,",
        tests=("test_error_sentence[op_errors]",),
    ),
)
PACKING = (
    Mutant(
        "packing ends one k too early",
        old="for (int64_t i = groups * kGroup; i < k; ++i) {",
        new="for (int64_t i = groups * kGroup; i + 1 < k; ++i) {",
        tests=("test_unpack_is_the_inverse_of_pack[op_laws]",),
    ),
    Mutant(
        "packing columns side by side sums none",
        old="        colsum[n] += w[i * stride_k + n];\n",
        new="",
        tests=("test_batched_product_is_exact", "test_kernel_equals_reference[int8_bmm-]"),
    ),
    Mutant(
        "the least code of a weight does not count for its magnitude",
        old="std::max<int>(high, -low)",
        new="high",
        tests=("test_unpack_is_the_inverse_of_pack[op_laws]", "test_extremes_are_exact"),
    ),
    Mutant(
        "weights are called narrow that are not",
        old="inline constexpr uint32_t kNarrow = 64;",
        new="inline constexpr uint32_t kNarrow = 65;",
        tests=("test_extremes_are_exact", "test_every_pair_of_bits_is_exact"),
        isa="avx2",
    ),
    Mutant(
        "the group sums of a panel lie where its zero points are",
        old="int32_t* sums = of_zero + (kind.zeros ? scales * kPanel : 0);",
        new="int32_t* sums = of_zero;",
        tests=(
            "test_kernel_equals_reference[pack_weight]",
            "test_kernel_equals_reference[linear]",
        ),
    ),
    Mutant(
        "floats packed by columns keep their faults",
        old="codes.finite[n] = code.finite ? -1 : 0;",
        new="codes.finite[n] = -1;",
        tests=("test_nan_and_infinity_stay_in_their_row_and_column",),
    ),
)
ROWS = (
    Mutant(
        "the range of a row ends one element too early on AVX-512",
        old="i + 16 <= n ? 0xffff : (1 << (n - i)) - 1;",
        new="i + 16 <= n ? 0xffff : (1 << (n - i - 1)) - 1;",
        tests=("test_quantize_equals_its_reference",),
        isa="avx512vnni",
    ),
    Mutant(
        "static codes are not clipped from above on AVX-512",
        old="    v = _mm512_min_ps(_mm512_set1_ps(1024.f), v);\n",
        new="",
        tests=("test_quantize_by_a_scale_equals_its_reference",),
        isa="avx512vnni",
    ),
    Mutant(
        "static codes are not clipped from below on AVX2",
        old="    v = _mm256_max_ps(_mm256_set1_ps(-1024.f), v);\n",
        new="",
        tests=("test_quantize_by_a_scale_equals_its_reference",),
        isa="avx2",
    ),
    Mutant(
        "the last code of a row is not written",
        old="__builtin_memcpy(q + i, codes, n - i);",
        new="__builtin_memcpy(q + i, codes, n - i - 1);",
        tests=("test_quantize_equals_its_reference",),
    ),
    Mutant(
        "a faulty row keeps its codes",
        old="  if (!code->finite) {  // (Q4)\n",
        new="  if (!code->finite && n == 0) {\n",
        tests=("test_nan_and_infinity_stay_in_their_rows[op_quantize]",),
    ),
    Mutant(
        "the smallest asymmetric scale may be zero",
        old="const float scale = at_least(high / n - low / n, kSmallestScale);",
        new="const float scale = high / n - low / n;",
        tests=("test_quantize_equals_its_reference",),
    ),
    Mutant(
        "a tensor's scale is that of some threads' rows",
        old="    all = widest(all, part);\n",
        new="    all = part;\n",
        tests=("test_threads_change_nothing",),
    ),
    Mutant(
        "stochastic rounding cuts off below zero",
        old="    v = sum < static_cast<float>(v) ? v - 1 : v;\n",
        new="",
        tests=("test_equals_its_reference",),
    ),
    Mutant(
        "Philox has a round less",
        old="constexpr int kLanes = 8, kRounds = 7;",
        new="constexpr int kLanes = 8, kRounds = 6;",
        tests=("test_equals_its_reference", "test_philox_gives_the_published_answers"),
    ),
    Mutant(
        "a rotated vector takes its neighbour's partner on AVX-512",
        old="if constexpr (h == 8) return _mm512_shuffle_f32x4(v, v, 0x4e);",
        new="if constexpr (h == 8) return _mm512_shuffle_f32x4(v, v, 0xb1);",
        tests=("test_kernels_that_this_processor_lacks_are_never_chosen",),
        isa="avx512vnni",
    ),
    Mutant(
        "rotating back multiplies by the factor before",
        old="!kBack && factor != nullptr ? x[i] * factor[i] : x[i]",
        new="factor != nullptr ? x[i] * factor[i] : x[i]",
        tests=(
            "test_rotate_equals_its_reference",
            "test_kernels_that_this_processor_lacks_are_never_chosen",
        ),
    ),
    Mutant(
        "the epilogue adds no bias",
        old="y[n] = y[n] + p.bias[n];",
        new="y[n] = y[n];",
        tests=("test_kernel_equals_reference[linear-]",),
    ),
    Mutant(
        "relu keeps what is negative and drops the rest",
        old="return select(v < 0.f, 0.f, v);",
        new="return select(v < 0.f, v, 0.f);",
        tests=("test_kernel_equals_reference[relu]",),
    ),
    Mutant(
        "a coefficient of gelu is off in its sixth digit",
        old="0.06774380803108215f",
        new="0.06774480803108215f",
        tests=("test_activation_error_on_a_dense_sweep[gelu]",),
    ),
    Mutant(
        "bfloat16 is cut off, not rounded",
        old="(bits + 0x7fff + ((bits >> 16) & 1)) >> 16",
        new="bits >> 16",
        tests=("test_results_round_to_the_nearest[op_quantize]",),
    ),
    Mutant(
        "dequantize adds the zero point",
        old="static_cast<int32_t>(-static_cast<uint32_t>(zero_point)), mul = 0;",
        new="zero_point, mul = 0;",
        tests=("test_kernel_equals_reference[dequantize]",),
    ),
    Mutant(
        "a requantized row with an infinity keeps its codes",
        old="    if (fault != 0) std::fill_n(to.q + m * w.n, w.n, int8_t{0});\n",
        new="",
        tests=("test_an_infinite_row_shows_and_leaves_the_others_alone",),
    ),
)
PASSES = (*CHECKS, *PACKING, *ROWS)
