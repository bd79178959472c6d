"""Defects of csrc/cpu/kernels: the kernels of each instruction set."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

KERNELS = (
    Mutant(
        "the portable kernel leaves out the last of four",
        old="      for (int i = 0; i < kGroup; ++i) {\n        tile[n] +=",
        new="      for (int i = 0; i + 1 < kGroup; ++i) {\n        tile[n] +=",
        tests=("test_kernel_equals_reference[int8_mm]",),
    ),
    Mutant(
        "a coefficient of gelu is off in its sixth digit",
        old="0.06774380803108215f",
        new="0.06774480803108215f",
        tests=("test_activation_error_on_a_dense_sweep[gelu]",),
    ),
    Mutant(
        "a group's zero points are added",
        old="acc -= sum * static_cast<uint32_t>(zero[n]);",
        new="acc += sum * static_cast<uint32_t>(zero[n]);",
        tests=("test_kernel_equals_reference[linear-, -g]",),
    ),
    Mutant(
        "codes of 4 bits are unpacked in the wrong half",
        old="(nibbles[i] & 15) | high[0][i], up = (nibbles[i] >> 4) | high[1][i];",
        new="(nibbles[i] >> 4) | high[0][i], up = (nibbles[i] & 15) | high[1][i];",
        tests=("test_every_instruction_set_and_form_has_the_same_bits",),
        isa="ref",
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
        old="__builtin_memcpy(q, codes, n);",
        new="__builtin_memcpy(q, codes, n - 1);",
        tests=("test_quantize_equals_its_reference",),
    ),
    Mutant(
        "a faulty row keeps its codes",
        old="  if (!code->finite) {  // (Q4)\n",
        new="  if (!code->finite && n == 0) {\n",
        tests=("test_nan_and_infinity_stay_in_their_rows[op_quantize]",),
    ),
    Mutant(
        "Philox has a round less",
        old="constexpr int kLanes = 8, kRounds = 7;",
        new="constexpr int kLanes = 8, kRounds = 6;",
        tests=("test_equals_its_reference", "test_philox_gives_the_published_answers"),
    ),
    Mutant(
        "the range of a row ends one element too early on AVX-512",
        old="i + 16 <= n ? 0xffff : (1 << (n - i)) - 1;",
        new="i + 16 <= n ? 0xffff : (1 << (n - i - 1)) - 1;",
        tests=("test_quantize_equals_its_reference",),
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
        "a rotated vector takes its neighbour's partner on AVX-512",
        old="if constexpr (h == 8) return _mm512_shuffle_f32x4(v, v, 0x4e);",
        new="if constexpr (h == 8) return _mm512_shuffle_f32x4(v, v, 0xb1);",
        tests=("test_kernels_that_this_processor_lacks_are_never_chosen",),
        isa="avx512vnni",
    ),
    Mutant(
        "a hidden key's score is added to minus infinity",
        old="t[n] = mask[n] == -kInfinity ? -kInfinity : t[n] + mask[n];",
        new="t[n] = t[n] + mask[n];",
        tests=("test_a_row_does_not_change_with_what_it_does_not_see",),
    ),
    Mutant(
        "a row that is masked everywhere sees nothing",
        old="const bool hidden = (out[n] <= kHidden) & (behind <= kBehind);",
        new="const bool hidden = out[n] <= kHidden;",
        tests=("test_a_row_that_is_masked_everywhere_equals_float",),
    ),
    Mutant(
        "probabilities are without the scales of their values",
        old="const Vector v = multiply(w, load(scale + at));",
        new="const Vector v = w;",
        tests=("test_kernel_equals_reference[int8_attention]",),
        isa="avx2",
    ),
    Mutant(
        "bfloat16 is cut off, not rounded",
        old="(bits + 0x7fff + ((bits >> 16) & 1)) >> 16",
        new="bits >> 16",
        tests=("test_results_round_to_the_nearest[op_quantize]",),
    ),
    Mutant(
        "a kernel is used although it computes wrong",
        old="if (found != static_cast<uint32_t>(problem.expected[begin + m][n])) return {m, n};",
        new="if (found != found) return {m, n};",
        tests=("test_kernels_agree_with_their_definition_between_pages_that_fault",),
    ),
    Mutant(
        "AMX stores the left columns twice",
        old="_tile_stored(1, out + kHalf, kSumStride);\n  if constexpr",
        new="_tile_stored(0, out + kHalf, kSumStride);\n  if constexpr",
        tests=("test_kernels_that_this_processor_lacks_are_never_chosen",),
        isa="amx",
    ),
    Mutant(
        "a pair of panels forgets its second one where it is finished at last",
        old="for (const EpilogueArgs& then : last.then) {",
        new="for (const EpilogueArgs& then : {last.then[0]}) {",
        tests=("test_rare_instructions_of_x86_64[amx]",),
        isa="amx",
    ),
    Mutant(
        "AVX2 adds two pairs that do not fit into 16 bits",
        old='offset_format<OffsetTwice, 64>("s7s7")',
        new='offset_format<OffsetTwice, 128>("s7s7")',
        tests=("test_kernels_that_this_processor_lacks_are_never_chosen",),
        isa="avx2",
    ),
    Mutant(
        "AVX-512 drops all but the first of its sums",
        old="      acc[0][r][1] = _mm512_add_epi32(acc[0][r][1], acc[s][r][1]);\n",
        new="",
        tests=("test_kernels_that_this_processor_lacks_are_never_chosen",),
        isa="avx512vnni",
    ),
    Mutant(
        "AVX-VNNI forgets what was summed before",
        old="return _mm256_dpbusd_avx_epi32(acc, code, load(w));",
        new="return _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), code, load(w));",
        tests=("test_kernels_that_this_processor_lacks_are_never_chosen",),
        isa="avxvnni",
    ),
    Mutant(
        "AMX takes denormal numbers for zeros where it rounds to bfloat16",
        old="constexpr int kDenormal = 0x20;",
        new="constexpr int kDenormal = 0;",
        tests=("test_kernels_that_this_processor_lacks_are_never_chosen",),
        isa="amx",
    ),
    Mutant(
        "the epilogue of AVX-512 leaves out what the last row adds",
        old="      if (add_[r] != 0) [[unlikely]] {",
        new="      if (add_[r] != 0 && left_ > 1) [[unlikely]] {",
        tests=("test_kernels_agree_with_their_definition_between_pages_that_fault",),
        isa="avx512vnni",
    ),
)
