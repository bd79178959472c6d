"""The CUDA operators equal their references on every row of the table, on the emulator."""

from __future__ import annotations

import pytest

from tests import cuda_emulator
from tests.rows import ROWS, Row
from tests.test_op_parts import assert_equals, as_tuple

OPS = (
    "quantize", "quantize_static", "quantize_stochastic", "fake_quantize", "dequantize", "rotate",
    "pack_weight", "unpack_weight",
)  # fmt: skip


@pytest.mark.parametrize("row", [row for row in ROWS if row.op in OPS], ids=str)
def test_emulated_kernel_equals_reference(row: Row) -> None:
    cuda_emulator.emulate()
    got = cuda_emulator.run(row.op, *cuda_emulator.arguments_of(row))
    expected = cuda_emulator.reference_of(row.op)(*row.arguments())
    assert_equals(row, row.arguments(), as_tuple(got), as_tuple(expected))
