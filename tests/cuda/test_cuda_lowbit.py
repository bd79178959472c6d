"""The CUDA operators of weights of 4 and 5 bits, on the emulator: they call Python by name
(qfx/ops/cuda_float_linear.py), which multiplies the values that codes stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qfx.ops import REFERENCES
from qfx.ops.header import MINIMUMS, NONE, ZERO_POINTS
from qfx.ops.layout import Layout
from tests.cuda.emulator import emulate, run
from tests.lib.pairs import every

KINDS = [(bits, group, shift) for bits, group in ((4, 32), (5, 128))
         for shift in (NONE, ZERO_POINTS, MINIMUMS)]  # fmt: skip
SHAPES = [(1, 64, 32), (7, 130, 33), (3, 0, 4), (0, 40, 5)]
CODE = [8, 0, 0, 0, 0]


@pytest.mark.parametrize("kind, shape", every(2 * KINDS, [*SHAPES, SHAPES[1]]))
def test_products_are_those_of_the_values(
    kind: tuple[int, int, int], shape: tuple[int, int, int]
) -> None:
    """(E4) (W3): exact, as float32 is for small codes."""
    (bits, group, shift), (m, k, n) = kind, shape
    emulate()
    g, half, each = torch.Generator().manual_seed(m + k), 1 << (bits - 1), (n, -(-k // group))
    codes = torch.randint(-half, half, (n, k), generator=g, dtype=torch.int8)
    scale = 2.0 ** torch.randint(-2, 3, each, generator=g)
    zero = torch.randint(-half, half, each, generator=g).int() if shift == ZERO_POINTS else None
    minimum = -scale if shift == MINIMUMS else None
    parts = (codes, scale, zero, minimum, bits, group)
    weight, layout = run("pack_weight", *parts), Layout(n, bits, group, group, int(shift != NONE))
    assert torch.equal(weight, REFERENCES["pack_weight"](*parts))
    unpacked = run("unpack_weight", weight, list(layout), k)
    expected = REFERENCES["unpack_weight"](weight, layout, k)
    assert all(torch.equal(a, b) for a, b in zip(unpacked, expected, strict=True))

    values = _values(*unpacked, group)
    q = torch.randint(-8, 8, (m, k), generator=g, dtype=torch.int8)
    how = (2.0 ** torch.randint(-2, 3, (m, 1), generator=g), torch.tensor([3]).int())
    x, bias = (q - how[1]) * how[0], torch.randint(-9, 9, (n,), generator=g).half()
    y = x @ values.t() + bias
    given = (weight, list(layout))
    assert torch.equal(run("linear", q, *how, *given, bias, "relu", torch.float32), y.relu())
    assert torch.equal(run("linear_float", x, *given, bias, "none", torch.float32), y)
    ste = (x, None, bias, None, None, [q, *how], *given, [*CODE, bits, 0], None, torch.float32)
    assert torch.equal(run("linear_ste", *ste), y)
    dynamic = run("linear_dynamic", x, *given, bias, CODE, "none", torch.float32)
    made = run("quantize", x, CODE)
    assert torch.equal(dynamic, run("linear", *made, *given, bias, "none", torch.float32))


def _values(codes: Tensor, scale: Tensor, zero: Tensor, minimum: Tensor, group: int) -> Tensor:
    scale, zero, minimum = (
        v.repeat_interleave(group, 1)[:, : codes.shape[1]] for v in (scale, zero, minimum)
    )
    return (codes - zero) * scale + minimum
