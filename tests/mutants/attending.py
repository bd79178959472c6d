"""Defects of attention: of its kernels, and of what finds it in a graph."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ATTENDING = (
    Mutant(
        "a causal row does not see its own key",
        old="return causal && m < k.rows ? m + 1 : k.rows;",
        new="return causal && m < k.rows ? m : k.rows;",
        tests=("test_kernel_equals_reference[int8_attention]",),
    ),
    Mutant(
        "a mask takes away the keys that count",
        old="out[n] = b[n] != 0 ? 0.f",
        new="out[n] = b[n] == 0 ? 0.f",
        tests=("test_kernel_equals_reference[int8_attention]",),
    ),
    Mutant(
        "of a mask that hides nothing only some elements are looked at",
        old="for (int64_t n = i; n < end; ++n) every &= plain(elements[n]);",
        new="for (int64_t n = i; n < end; n += 2) every &= plain(elements[n]);",
        tests=("test_a_mask_that_hides_nothing_is_none_and_one_that_hides_a_key_is_not",),
    ),
    Mutant(
        "a query has the mask of the one before",
        old="const bool again = i > 0 && mask.row_stride == 0 && keys == keys_[r - 1];",
        new="const bool again = i > 0 && keys == keys_[r - 1];",
        tests=("test_kernel_equals_reference[int8_attention]",),
    ),
    Mutant(
        "keys lose their sum, not their mean",
        old="out.center[d] /= static_cast<float>(count);",
        new="out.center[d] /= 1.f;",
        tests=("test_kernel_equals_reference[int8_attention]",),
    ),
    Mutant(
        "one query ignores its mask's rows",
        old="load_mask(kernels, at(a.mask, query.mask), m, keys, mask);",
        new="load_mask(kernels, at(a.mask, query.mask), 0, keys, mask);",
        tests=("test_kernel_equals_reference[attention_decode]",),
    ),
    Mutant(
        "new keys are written over the past",
        old="copy(added_, i, out + past_.rows * bytes);",
        new="copy(added_, i, out);",
        tests=("test_kernel_equals_reference[attention_append]",),
    ),
    Mutant(
        "a score leaves out the last feature",
        old="for (int rest = 0; i < d; ++i, ++rest)",
        new="for (int rest = 0; i + 1 < d; ++i, ++rest)",
        tests=("test_kernel_equals_reference[attention_decode]",),
    ),
    Mutant(
        "the low byte of a probability is lost",
        old="static_cast<float>(static_cast<int32_t>(l));\n      out[n]",
        new="0.f * static_cast<float>(static_cast<int32_t>(l));\n      out[n]",
        tests=("test_kernel_equals_reference[int8_attention]",),
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
        "causal keys have the center of all",
        old="*out.centered = !a.causal && all_see",
        new="*out.centered = all_see",
        tests=(
            "test_a_row_does_not_change_with_what_it_does_not_see",
            "test_kernel_equals_reference[int8_attention]",
        ),
    ),
    Mutant(
        "the center has keys that are hidden",
        old="while (end < k.rows && end < n + kPanel && seen[end] != 0) ++end;",
        new="while (end < k.rows && end < n + kPanel) ++end;",
        tests=("test_a_row_does_not_change_with_what_it_does_not_see",),
    ),
    Mutant(
        "rows that see different keys have one center",
        old="same &= visible == (seen[n] != 0);",
        new="same &= visible || !visible;",
        tests=("test_a_row_does_not_change_with_what_it_does_not_see",),
    ),
    Mutant(
        "heads that share keys have the center of the first one's mask",
        old="if (masked_apart(a)) return attend(kernels, unshared(a));\n",
        new="",
        tests=("test_heads_that_share_keys_are_those_one_by_one",),
    ),
    Mutant(
        "probabilities are without the scales of their values",
        old="const Vector v = multiply(w, load(args->value_scale + at));",
        new="const Vector v = w;",
        tests=("test_kernel_equals_reference[int8_attention]",),
        isa="avx2",
    ),
    Mutant(
        "a faulty value does not show",
        old='if (r < count && !finite) out.k_scale[first + r] = std::nanf("");',
        new="",
        tests=("test_faults_show_in_the_rows_that_see_them",),
    ),
    Mutant(
        "a block of rows looks at the panels of its last row",
        old="all = {std::min(all.first, seen.first), std::max(all.end, seen.end)};",
        new="all = seen;",
        tests=(
            "test_kernel_equals_reference[int8_attention]",
            "test_within_the_bound_of_exact_attention[attention_seen]",
        ),
    ),
    Mutant(
        "all queries that share keys are the first of them",
        old="axes.push_back({group, axis.q, 0, 0, axis.mask, axis.out});",
        new="axes.push_back({group, 0, 0, 0, axis.mask, axis.out});",
        tests=(
            "test_kernel_equals_reference[int8_attention]",
            "test_all_instruction_sets_layouts_and_heads_give_the_same_bits",
        ),
    ),
    Mutant(
        "causal rows count as if they saw all keys",
        old="return growing * (growing + 1) / 2 + (m - growing) * keys + m * kOfRow;",
        new="return m * keys + m * kOfRow;",
        tests=(
            "test_shares_hold_every_row_once_and_the_same_work",
            "test_twelve_heads_keep_all_threads_busy",
        ),
    ),
    Mutant(
        "one query that sees no key is not zero",
        old="const float inverse = sum == 0.f ? 0.f : 1.f / sum;",
        new="const float inverse = 1.f / sum;",
        tests=("test_rows_without_keys_are_zero_and_faults_show",),
    ),
    Mutant(
        "one query reads what it does not see",
        old="while (end < keys && mask[end] != kHidden) ++end;",
        new="while (end < keys) ++end;",
        tests=("test_a_row_does_not_change_with_what_it_does_not_see",),
    ),
    Mutant(
        "an attention whose gradient is recorded becomes int8",
        old='return f"{what}: its gradient is recorded, and is not int8 yet"',
        new="return None",
        tests=("test_attention_that_records_gradients_stays_float",),
    ),
    Mutant(
        "keys are read before their heads were copied, though they are written meanwhile",
        old="groups != same or _written(attention, key, val):",
        new="groups != same:",
        tests=("test_heads_that_share_keys_are_int8",),
    ),
    Mutant(
        "heads of keys that alternate are taken for groups",
        old="inserted: (*batch, heads, 1, n, d),",
        new="inserted: tuple(value(inserted).shape),",
        tests=("test_heads_that_share_keys_are_int8",),
    ),
)
