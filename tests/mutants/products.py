"""Defects of csrc/cpu/gemm, binary and core: packing, blocks and threads of products."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PRODUCTS = (
    Mutant(
        "threads leave out a panel between two shares of experts",
        old="if (first < last) f(Task{",
        new="if (first + 1 < last) f(Task{",
        tests=("test_a_block_has_the_bits_of_its_experts_one_by_one",),
    ),
    Mutant(
        "the shift of a gate is left out",
        old="-gate.limit) + gate.shift;",
        new="-gate.limit);",
        tests=("test_a_block_has_the_bits_of_its_experts_one_by_one",),
    ),
    Mutant(
        "zero is negative to the binary kernels of AVX2",
        old="_mm256_cmp_ps(v, zero, _CMP_GE_OQ)",
        new="_mm256_cmp_ps(v, zero, _CMP_GT_OQ)",
        tests=("test_sign_of_zero_nan_and_infinity",),
        isa="avx2",
    ),
    Mutant(
        "binary kernels of AVX-512 count the left columns twice",
        old="count[r][1] = _mm512_add_epi32(count[r][1], _mm512_popcnt_epi32(differ1));",
        new="count[r][1] = _mm512_add_epi32(count[r][1], _mm512_popcnt_epi32(differ0));",
        tests=("test_kernel_equals_reference[binary_mm]",),
        isa="amx",  # whose processors count bits: not all with AVX-512 do
    ),
    Mutant(
        "words of a packed weight may change places",
        old="plain[l] += row[l];\n      falling[l] += plain[l];",
        new="plain[l] += row[l];",
        tests=("test_any_changed_byte_of_a_packed_weight_is_noticed[op_errors]",),
    ),
    Mutant(
        "nobody waits for rows that others fill",
        old="    wait_until([&] { return state_.load(std::memory_order_acquire) "
        "!= State::kOpen; });\n"
        "    return state_.load(std::memory_order_relaxed) == State::kDone;\n",
        new="    return true;\n",
        tests=("test_kernels_agree_with_their_definition_between_pages_that_fault",),
    ),
    Mutant(
        "the second part of K is not added",
        old="for (int64_t i = 1; i < parts_; ++i) add(",
        new="for (int64_t i = 2; i < parts_; ++i) add(",
        tests=("test_kernels_agree_with_their_definition_between_pages_that_fault",),
    ),
    Mutant(
        "float activations lose what is beyond the first chunk",
        old="part.data += first * w.shape().n * to.element();",
        new="part.data += 0;",
        tests=("test_weight_only_of_tiles_and_blocks_of_rows",),
    ),
    Mutant(
        "a second block of K begins anew",
        old="tiles[height_here - 1](a, rows.stride, b, groups, ahead, tile, k > 0);",
        new="tiles[height_here - 1](a, rows.stride, b, groups, ahead, tile, false);",
        tests=("test_kernel_equals_reference[int8_mm]",),
    ),
    Mutant(
        "the last block of K is as deep as the others",
        old="const int64_t groups = std::min(how.block, how.depth - k) / kGroup;",
        new="const int64_t groups = how.block / kGroup;",
        tests=("test_parameters_change_no_bit",),
    ),
    Mutant(
        "a panel that has no partner is left out",
        old="work.run_all(task.block, p + 2 * half, task.panel_end);",
        new="if (half == 0) work.run_all(task.block, p + 2 * half, task.panel_end);",
        tests=("test_parameters_change_no_bit",),
        isa="avx512vnni",
    ),
    Mutant(
        "what is left of the rows is nobody's where it is cheap",
        old="meeting_ = std::max<int64_t>(units_ - 1, 0) / of_units_;",
        new="meeting_ = units_ / of_units_;",
        tests=("test_shares_hold_every_row_and_panel_once_and_the_same_cost",),
    ),
    Mutant(
        "the last block of rows takes one row more",
        old="std::min(rows_, (block + 1) * height_)",
        new="std::min(rows_ - 1, (block + 1) * height_)",
        tests=("test_kernel_equals_reference[int8_mm]",),
    ),
    Mutant(
        "a last group that is not whole is never added",
        old="const bool complete = k == how_.depth || k == (g + groups) * w_.group;",
        new="const bool complete = k == (g + groups) * w_.group;",
        tests=("test_kernel_equals_reference[linear-, -g]",),
    ),
    Mutant(
        "a packed weight's contents are not looked at",
        old='return sum == contents.sum ? ""',
        new='return true ? ""',
        tests=("test_any_changed_byte_of_a_packed_weight_is_noticed[op_errors]",),
    ),
    Mutant(
        "rows of one kind of weight are those of another",
        old="a.whole.narrow == b.whole.narrow;",
        new="true;",
        tests=("test_small_and_large_codes",),
    ),
    Mutant(
        "the last columns of few bits are written behind the output",
        old="whole = std::min(end, w_.shape.n / kPanel); is_output",
        new="whole = end; is_output",
        tests=("test_what_is_done_to_the_sums_of_many_panels",),
    ),
    Mutant(
        "packing ends one k too early",
        old="for (int64_t i = groups * kGroup; i < k; ++i) {",
        new="for (int64_t i = groups * kGroup; i + 1 < k; ++i) {",
        tests=("test_unpack_is_the_inverse_of_pack[op_weight]",),
    ),
    Mutant(
        "the least code of a weight does not count for its magnitude",
        old="std::max<int>(high, -low)",
        new="high",
        tests=("test_unpack_is_the_inverse_of_pack[op_weight]", "test_extremes_are_exact"),
    ),
    Mutant(
        "weights are called narrow that are not",
        old="inline constexpr uint32_t kNarrow = 64;",
        new="inline constexpr uint32_t kNarrow = 65;",
        tests=("test_extremes_are_exact", "test_every_pair_of_bits_is_exact"),
        isa="avx2",
    ),
    Mutant(
        "a second chunk of rows is written over the first",
        old="const int64_t at = ((first + m) * to.row_of(w)",
        new="const int64_t at = (m * to.row_of(w)",
        tests=("test_kernel_equals_reference[linear-]",),
    ),
    Mutant(
        "every row of a tile has the residual of the first",
        old="const char* row = e.residual + m * e.ldo * element;",
        new="const char* row = e.residual;",
        tests=("test_a_residual_is_added_before_the_activation",),
    ),
    Mutant(
        "a depthwise convolution ignores the zero points of its channels",
        old="columns_.first[n] = -codes_.zero[n] *",
        new="columns_.first[n] = -kLaneOffset *",
        tests=("test_every_instruction_set_has_the_bits_of_the_reference",),
    ),
    Mutant(
        "codes of a depthwise convolution are never clamped",
        old="codes->clamped = (within & range.finite) != 0xffff;",
        new="codes->clamped = range.finite != 0xffff;",
        tests=("test_a_code_beyond_the_last_is_clamped",),
        isa="avx512vnni",
    ),
    Mutant(
        "a tensor's scale is that of some threads' rows",
        old="    all = widest(all, part);\n",
        new="    all = part;\n",
        tests=("test_threads_change_nothing",),
    ),
    Mutant(
        "a tile that waits is finished with the columns of the next panel",
        old="left.panels[left.turn ^= 1][0]",
        new="left.panels[0][0]",
        tests=("test_rare_instructions_of_x86_64[amx]",),
        isa="amx",
    ),
    Mutant(
        "a packed weight that is too long is read",
        old="expected = size_of(header); size != expected) {",
        new="expected = size_of(header); size < expected) {",
        tests=("test_error_sentence[op_errors]", "test_nonsense_raises_python_exceptions_only"),
    ),
    Mutant(
        "the tiles of a panel share their sums where K is cut",
        old="whole ? sums : sums + row * kPanel",
        new="sums",
        tests=("test_parameters_change_no_bit",),
    ),
)
