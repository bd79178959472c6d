"""Defects of the extension's products."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MATMULS = (
    Mutant(
        "a second block of K begins anew",
        old="tiles[height_here - 1](a, rows.stride, b, groups, ahead, tile, k > 0);",
        new="tiles[height_here - 1](a, rows.stride, b, groups, ahead, tile, false);",
        tests=("test_kernel_equals_reference[int8_mm]",),
    ),
    Mutant(
        "a K of whole blocks is never finished",
        old="const bool last = k + how.block >= how.depth;",
        new="const bool last = k + how.block > how.depth;",
        tests=("test_kernel_equals_reference[int8_mm]",),
    ),
    Mutant(
        "the last block of rows takes one row more",
        old="std::min(rows_, (block + 1) * height_)",
        new="std::min(rows_ - 1, (block + 1) * height_)",
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
        "both panels of a pair are the first",
        old="w.panel(q) - w.panel(p), groups,",
        new="0, groups,",
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
        "blocks are as high on many threads as on one",
        old="height > tile && best.longest()",
        new="height > most && best.longest()",
        tests=("test_threads_end_together_where_there_are_tiles_enough",),
    ),
    Mutant(
        "nobody waits for rows that others fill",
        old="    return wait();\n",
        new="    return true;\n",
        tests=("test_kernels_agree_with_their_definition_between_pages_that_fault",),
    ),
    Mutant(
        "products of a team all have the rows of the first",
        old="const auto& [from, packed, sink] = batch[task.product];",
        new="const auto& [from, packed, sink] = batch[0];",
        tests=("test_parameters_change_no_bit",),
    ),
    Mutant(
        "a team is woken for less than it saves",
        old="saved > kSerialWork ?",
        new="saved > 0 ?",
        tests=("test_small_products_wake_no_team_of_their_own",),
    ),
    Mutant(
        "a unit takes over one row late",
        old="rows < tuning_of(*format).minimum_rows",
        new="rows <= tuning_of(*format).minimum_rows",
        tests=("test_rows_from_which_a_unit_takes_over",),
        isa="amx",
    ),
    Mutant(
        "a parameter below its least value is set",
        old="if (value >= field.least && value <= field.most) continue;",
        new="if (value <= field.most) continue;",
        tests=("test_what_cannot_be_set_is_refused_with_a_sentence",),
    ),
    Mutant(
        "a second chunk of rows is written over the first",
        old="const {\n  char* out = to.data + ((first + m) * w.n",
        new="const {\n  char* out = to.data + (m * w.n",
        tests=("test_kernel_equals_reference[int8_linear-]",),
    ),
    Mutant(
        "codes of -65 are called narrow",
        old="static_cast<uint8_t>(q[j] + 64) & 0x80",
        new="static_cast<uint8_t>(q[j] + 65) & 0x80",
        tests=("test_extremes_are_exact", "test_every_pair_of_bits_is_exact"),
        isa="avx2",
    ),
    Mutant(
        "a batched product reads b transposed",
        old="size.n, size.k, b.row_stride, b.column_stride,\n         packed);",
        new="size.n, size.k, b.column_stride, b.row_stride,\n         packed);",
        tests=("test_batched_product_is_exact",),
    ),
    Mutant(
        "a batched product per tensor reads rows that lie apart as if they did not",
        old="a = spec.per_tensor ? made_contiguous(a) : with_contiguous_rows(a);",
        new="a = with_contiguous_rows(a);",
        tests=("test_where_the_operands_lie_changes_nothing",),
    ),
    Mutant(
        "a group's zero points are added",
        old="acc -= sum * static_cast<uint32_t>(zero[n]);",
        new="acc += sum * static_cast<uint32_t>(zero[n]);",
        tests=("test_kernel_equals_reference[int8_linear_groups]",),
    ),
    Mutant(
        "a last group that is not whole is never added",
        old="const bool complete = k == how_.depth || k == (g + groups) * w_.group;",
        new="const bool complete = k == (g + groups) * w_.group;",
        tests=("test_kernel_equals_reference[int8_linear_groups]",),
    ),
    Mutant(
        "float activations lose what is beyond the first chunk",
        old="to.data = out + first * w.n * to.element();",
        new="to.data = out;",
        tests=("test_weight_only_of_more_rows_than_are_widened_at_a_time",),
    ),
    Mutant(
        "the guard's bound forgets the weight's error",
        old="(bound.step * scale * bound.alpha + transformed * bound.beta) / size",
        new="bound.step * scale * bound.alpha / size",
        tests=("test_kernel_equals_reference[int8_linear_guarded]",),
    ),
    Mutant(
        "the guard lets rows with a NaN run in int8",
        old="above[m] = !(bound_of(bound, row, x.columns, scales[m]) <= guard);",
        new="above[m] = bound_of(bound, row, x.columns, scales[m]) > guard;",
        tests=("test_faulty_rows_are_those_of_float",),
    ),
    Mutant(
        "every guarded call counts as one with rows in float",
        old="counts.float_calls += float_rows > 0;",
        new="counts.float_calls += float_rows >= 0;",
        tests=("test_counts",),
    ),
    Mutant(
        "binary products forget the blocks of K before",
        old="kernels.tiles[here - 1](a, rows.stride, b, groups, tile, g > 0);",
        new="kernels.tiles[here - 1](a, rows.stride, b, groups, tile, false);",
        tests=("test_kernel_equals_reference[binary_mm]",),
    ),
    Mutant(
        "a NaN has a sign",
        old="row_scale[m] = nan ? std::numeric_limits<float>::quiet_NaN() : 1.f;",
        new="row_scale[m] = 1.f;",
        tests=("test_nan_stays_in_its_row[op_binary]",),
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
)
INSTRUCTION_SETS = (
    Mutant(
        "AMX stores the left columns twice",
        old="_tile_stored(1, out + kHalf, kSumStride);\n  if constexpr",
        new="_tile_stored(0, out + kHalf, kSumStride);\n  if constexpr",
        tests=("test_kernels_that_this_processor_lacks_are_never_chosen",),
        isa="amx",
    ),
    Mutant(
        "a tile that waits is finished with the columns of the next panel",
        old="left.panels[left.turn ^= 1][0]",
        new="left.panels[0][0]",
        tests=("test_rare_instructions_of_x86_64[amx]",),
        isa="amx",
    ),
    Mutant(
        "AMX takes denormal numbers for zeros where it rounds to bfloat16",
        old="constexpr int kDenormal = 0x20;",
        new="constexpr int kDenormal = 0;",
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
        "the last tile of a block is never finished",
        old="if (last.sums != nullptr) strips.finish(last);",
        new="",
        tests=("test_rare_instructions_of_x86_64[amx]",),
        isa="amx",
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
        "AVX2 adds two pairs that do not fit into 16 bits",
        old='offset_format<OffsetTwice, 64>("s7s7")',
        new='offset_format<OffsetTwice, 128>("s7s7")',
        tests=("test_kernels_that_this_processor_lacks_are_never_chosen",),
        isa="avx2",
    ),
    Mutant(
        "AVX2 forgets the sign of the last codes",
        old="    add += code < 0 ? size : 0;\n",
        new="",
        tests=("test_kernels_that_this_processor_lacks_are_never_chosen",),
        isa="avx2",
    ),
    Mutant(
        "the portable kernel leaves out the last of four",
        old="      for (int i = 0; i < kGroup; ++i) {\n        tile[n] +=",
        new="      for (int i = 0; i + 1 < kGroup; ++i) {\n        tile[n] +=",
        tests=("test_kernel_equals_reference[int8_mm]",),
    ),
    Mutant(
        "a kernel is used although it computes wrong",
        old="if (found != static_cast<uint32_t>(problem.expected[begin + m][n])) return {m, n};",
        new="if (found != found) return {m, n};",
        tests=("test_kernels_agree_with_their_definition_between_pages_that_fault",),
    ),
)
PRODUCTS = (*MATMULS, *INSTRUCTION_SETS)
