"""The CUDA operators on the emulator: equal to their references on rows of the table, whatever
the order of threads; and the emulator's own tests."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest

from qfx.ops.forms import CUDA_GROUP_MULTIPLE
from tests.cuda import emulator as cuda_emulator
from tests.lib.pairs import covering
from tests.lib.rows import ALL_ROWS, Row, reached
from tests.ops.test_op_parts import WITHOUT_CUDA, as_tuple, assert_equals

TESTS_OF_THE_EMULATOR = {
    "missing_barrier", "shared_memory_is_poison", "clusters_meet", "clusters_that_fail",
    "deadlock_names_who_waits_for_what", "writes_beyond_shared_memory", "faults_are_sentences",
    "named_barriers", "deferred_actions", "asynchronous_copies", "warps", "atomics", "products",
}  # fmt: skip


def small(row: Row) -> Row:
    """Fewer rows where emulation would take long: no CUDA kernel shares one among rows that far."""
    return replace(row, leading=(5,)) if row.k >= 60000 else row


# linear_float adds up in another order, (W2): tests/cuda/test_cuda_gemm.py has its bound.
ELSEWHERE = {*WITHOUT_CUDA, "linear_float"}


def served(row: Row) -> bool:
    """Groups are of weights there, and of multiples of 64. Products of weights of few bits are
    float matmuls: tests/cuda/test_cuda_lowbit.py."""
    if row.op in ELSEWHERE or row.x_groups:
        return False
    if row.w_bits != 8:
        return row.op in ("pack_weight", "unpack_weight")
    return row.layout.group % CUDA_GROUP_MULTIPLE == 0


CUDA_ROWS = covering(list(dict.fromkeys(small(r) for r in ALL_ROWS if served(r))), reached)


def test_the_emulator_sees_what_is_wrong() -> None:
    program = str(cuda_emulator.build() / "emulator_tests")
    result = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert set(result.stdout.split("\n")) == {*(f"{t} ok" for t in TESTS_OF_THE_EMULATOR), ""}


@pytest.mark.parametrize("row", CUDA_ROWS, ids=str)
def test_emulated_kernel_equals_reference(row: Row) -> None:
    cuda_emulator.emulate()
    got = cuda_emulator.run(row.op, *cuda_emulator.arguments_of(row))
    expected = cuda_emulator.reference_of(row.op)(*row.arguments())
    assert_equals(row, row.arguments(), as_tuple(got), as_tuple(expected))
