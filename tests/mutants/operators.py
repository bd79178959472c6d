"""Defects of csrc/cpu/ops and program, and of csrc itself."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

OPERATORS = (
    Mutant(
        "a weight packed for another N is read",
        old="STD_TORCH_CHECK(shape.n == known.n, op,",
        new="STD_TORCH_CHECK(shape.n >= known.n, op,",
        tests=("test_error_sentence[op_errors]",),
    ),
    Mutant(
        "a packed weight is trusted where another one was freed",
        old="      forget_whole(memory);\n",
        new="",
        tests=("test_a_damaged_copy_where_a_packed_weight_was_freed_is_refused",),
    ),
    Mutant(
        "a batched product per tensor reads rows that lie apart as if they did not",
        old="a = spec.per_tensor ? made_contiguous(a) : with_contiguous_rows(a);",
        new="a = with_contiguous_rows(a);",
        tests=("test_where_the_operands_lie_changes_nothing",),
    ),
    Mutant(
        "the guard's bound forgets the weight's error",
        old="(bound.step * scale * bound.alpha + transformed * bound.beta) / size",
        new="bound.step * scale * bound.alpha / size",
        tests=("test_kernel_equals_reference[linear_guarded]",),
    ),
    Mutant(
        "several biases of half precision are the last of them",
        old="return copies->emplace_back(values, values + n).data();",
        new="return values;",
        tests=("test_they_give_the_bits_of_one_for_each",),
    ),
    Mutant(
        "a requantized row with an infinity keeps its codes",
        old="    if (fault != 0) std::fill_n(to.q + m * w.n, w.n, int8_t{0});\n",
        new="",
        tests=("test_an_infinite_row_shows_and_leaves_the_others_alone",),
    ),
    Mutant(
        "an operand may leave its slot",
        old="bytes <= slot_bytes_[o.slot] - o.offset && ",
        new="",
        tests=("test_what_is_refused[offset]",),
    ),
    Mutant(
        "a sample has nothing of the last rows",
        old="for (int64_t place = 0; place < kPlaces; ++place) {",
        new="for (int64_t place = 0; place + 1 < kPlaces; ++place) {",
        tests=("test_a_merge_is_seen",),
    ),
    Mutant(
        "the content's hash forgets what was before",
        old="lanes_[i] = mixed(lanes_[i], words[i]);\n    }\n    if",
        new="lanes_[i] = mixed(uint64_t{0}, words[i]);\n    }\n    if",
        tests=("test_the_content_is_all_of_a_tensor",),
    ),
    Mutant(
        "the wrapper does not look at versions",
        old="(!stamp.version || reader_.version(weight) == *stamp.version) &&",
        new="",
        tests=("test_a_version_tells_of_an_element_that_no_sample_has",),
    ),
    Mutant(
        "the wrapper takes a new storage for a dead one",
        old="reader_.storage(weight).get() == referent(stamp.storage).get();",
        new="true;",
        tests=("test_a_storage_in_the_place_of_a_dead_one_is_another",),
    ),
    Mutant(
        "the wrapper does not look at the weights' memory",
        old="return stamp.sample.hash() == stamp.hash;",
        new="return true;",
        tests=("test_a_merge_is_seen", "test_change_is_seen"),
    ),
)
