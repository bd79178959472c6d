"""Defects of csrc/cpu/attention."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ATTENTION = (
    Mutant(
        "a causal row does not see its own key",
        old="return causal && m < k.rows ? m + 1 : k.rows;",
        new="return causal && m < k.rows ? m : k.rows;",
        tests=("test_kernel_equals_reference[int8_attention]",),
    ),
    Mutant(
        "one query reads what it does not see",
        old="while (end < keys && mask[end] != kHidden) ++end;",
        new="while (end < keys) ++end;",
        tests=("test_a_row_does_not_change_with_what_it_does_not_see",),
    ),
    Mutant(
        "causal keys have the center of all",
        old="*centered = !a.causal && all_see",
        new="*centered = all_see",
        tests=(
            "test_a_row_does_not_change_with_what_it_does_not_see",
            "test_kernel_equals_reference[int8_attention]",
        ),
    ),
    Mutant(
        "a faulty value does not show",
        old='if (r < count && !finite) out.k_scale[first + r] = std::nanf("");',
        new="",
        tests=("test_faults_show_in_the_rows_that_see_them",),
    ),
    Mutant(
        "gradients of scores do not add up to zero",
        old="const Vector mean = all(by_halves<add>(sum) * args->inverse);",
        new="const Vector mean = all(0.f);",
        tests=("test_kernel_equals_reference[int8_attention_backward]",),
    ),
    Mutant(
        "heads of queries with masks of their own have the center of the first",
        old="} else if (mask != centered_under_) {",
        new="} else if (false) {",
        tests=("test_bits_do_not_depend_on_processor_threads_and_layout",),
    ),
    Mutant(
        "the last rows of a block keep codes of the block before",
        old="std::memset(out->rows + count * depth_n_, 0, (padded - count) * depth_n_);",
        new="",
        tests=("test_kernel_equals_reference[int8_attention_backward]",),
    ),
    Mutant(
        "a faulty key that no row sees shows in all gradients",
        old="const bool counts = n < n_ && std::isfinite(k_.scale[n]);",
        new="const bool counts = n < n_;",
        tests=("test_rows_and_keys_that_are_not_seen",),
    ),
    Mutant(
        "rows that see different keys have one center",
        old="same &= visible == (seen[n] != 0);",
        new="same &= visible || !visible;",
        tests=("test_kernel_equals_reference[int8_attention]",),
    ),
    Mutant(
        "a query has the mask of the one before",
        old="const bool again = i > 0 && mask.row_stride == 0 && keys == keys_[r - 1];",
        new="const bool again = i > 0 && keys == keys_[r - 1];",
        tests=("test_kernel_equals_reference[int8_attention]",),
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
        "a window is one key too long",
        old="std::max<int64_t>(longest_ - window + 1, 0)",
        new="std::max<int64_t>(longest_ - window, 0)",
        tests=("test_a_text_has_the_bits_that_it_has_alone",),
    ),
    Mutant(
        "tokens of a page are written as if all pages were one behind the other",
        old="const CacheHead head = part.head(slots[t] / part.capacity, h);",
        new="const CacheHead head = part.head(0, h);",
        tests=("test_a_text_has_the_bits_that_it_has_alone",),
    ),
)
