"""The laws of the transform of K (R1), on every instruction set of this machine."""

from __future__ import annotations

import pytest
import qfx._C as _C
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qfx.ops import REFERENCES
from qfx.ops.code import Code
from qfx.ops.layout import Layout
from tests.conftest import on_isa, same_bits
from tests.lib.pairs import pairs
from tests.lib.strategies import (
    CODES,
    DTYPES,
    FAULTY,
    FINITE,
    ISAS,
    POSITIVE,
    SEEDS,
    SIZES,
    filled,
    strided,
)  # fmt: skip

ops = torch.ops.qfx
ROTATIONS = (16, 64)
R4 = torch.tensor([[1, 1, 1, -1], [-1, 1, 1, 1], [-1, -1, 1, -1], [1, -1, 1, 1]]).double()
HALF_ULP, SMALLEST = 2.0**-24, 2.0**-149
TAME = tuple(f for f in FINITE if f not in ("huge", "largest"))  # sums do not overflow


def matrix_of(rotation: int, k: int) -> Tensor:
    """R as a float64 matrix [K, K]."""
    block = torch.eye(1).double()
    for _ in range({0: 0, 16: 2, 64: 3}[rotation]):
        block = torch.kron(block, R4 / 2)
    return torch.block_diag(*[block] * (k // len(block))) if k else torch.zeros(0, 0).double()


@st.composite
def problems(draw: st.DrawFn, fills: tuple[str, ...]) -> tuple[Tensor, Tensor | None, int]:
    """x [M, K] of any layout, a factor or None, a rotation that divides K."""
    rotation = draw(st.sampled_from((0, *ROTATIONS)))
    k = draw(SIZES) if not rotation else rotation * draw(st.sampled_from([0, 1, 2, 3, 9]))
    generator = torch.Generator().manual_seed(draw(SEEDS))
    x = filled(draw(st.sampled_from(fills)), draw(POSITIVE), k, generator)
    factor = torch.exp(torch.randn(k, 2, generator=generator))[:, 0]  # not contiguous
    layout = draw(st.sampled_from(["contiguous", "transposed", "slice", "expanded"]))
    return strided(x, layout), factor if draw(st.booleans()) else None, rotation


@given(problems(FINITE + FAULTY), DTYPES, st.booleans(), ISAS)
def test_rotate_equals_its_reference(
    problem: tuple[Tensor, Tensor | None, int], dtype: torch.dtype, back: bool, isa: str
) -> None:
    x, factor, rotation = problem
    with on_isa(isa):
        got = ops.rotate(x.to(dtype), factor, rotation, back)
    assert same_bits(got, REFERENCES["rotate"](x.to(dtype), factor, rotation, back))


@given(problems(TAME), st.booleans())
def test_rotate_is_the_matrix(problem: tuple[Tensor, Tensor | None, int], back: bool) -> None:
    """(B4), against the Kronecker product in float64."""
    x, factor, rotation = problem
    k = x.shape[1]
    f = torch.ones(k).double() if factor is None else factor.double()
    r = matrix_of(rotation, k)
    map_kk = f[:, None] * r.t() if back else r * f
    exact, terms = x.double() @ map_kk.t(), x.double().abs() @ map_kk.t().abs()
    error = (ops.rotate(x, factor, rotation, back).double() - exact).abs()
    assert (error <= 8 * HALF_ULP * terms * 1.01 + 8 * SMALLEST * f).all()


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_rotation_is_orthogonal_and_spreads_a_constant(rotation: int) -> None:
    r = matrix_of(rotation, rotation)
    assert torch.equal(r @ r.t(), torch.eye(rotation).double())
    found = torch.stack([ops.rotate(e, None, rotation) for e in torch.eye(rotation)], 1)
    assert torch.equal(found.double(), r)
    assert torch.equal(ops.rotate(torch.full((rotation,), 3.0), None, rotation).abs(),
                       torch.full((rotation,), 3.0))  # fmt: skip


@given(problems(FINITE + FAULTY), DTYPES, CODES, ISAS)
def test_quantize_quantizes_the_rotated(
    problem: tuple[Tensor, Tensor | None, int], dtype: torch.dtype, code: Code, isa: str
) -> None:
    """The same bits in one step and in two, for dynamic and given scales, and in a linear."""
    x, factor, rotation = problem
    x = x.to(dtype)
    weight = torch.randint(-128, 128, (33, x.shape[1]), dtype=torch.int8)
    packed = ops.pack_weight(weight, torch.linspace(0.001, 0.02, 33))
    static = (torch.tensor([0.05]), torch.tensor([3], dtype=torch.int32))
    turning, end = code._replace(rotation=rotation), ("none", torch.float32)
    with on_isa(isa):
        y = ops.rotate(x.float(), factor, rotation)
        pairs = [
            *zip(ops.quantize(x, turning, factor=factor), ops.quantize(y, code), strict=True),
            *zip(ops.quantize(x, turning, *static, factor=factor), ops.quantize(y, code, *static),
                 strict=True),
            (ops.linear_dynamic(x, packed, Layout(33), None, turning, *end, factor),
             ops.linear_dynamic(y, packed, Layout(33), None, code, *end)),
        ]  # fmt: skip
    assert all(same_bits(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    "rotation, bad, isa",
    pairs(ROTATIONS, [torch.nan, torch.inf, -torch.inf], _C.isas()),
    indirect=["isa"],
)
def test_nan_and_infinity_stay_in_their_rows(rotation: int, bad: float, isa: str) -> None:
    """(Q4) of the rotated row: NaN in the row of the fault, the same bits in the others."""
    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(0))
    faulty = x.clone()
    faulty[2, 70] = bad
    weight = ops.pack_weight(torch.ones(3, 192, dtype=torch.int8), torch.ones(3))
    how = (weight, Layout(3), None, Code(rotation=rotation), "none", torch.float32)
    y, clean = (ops.linear_dynamic(v, *how) for v in (faulty, x))
    others = torch.arange(5) != 2
    assert y[2].isnan().all() and same_bits(y[others], clean[others])


@pytest.mark.parametrize(
    "leading, rotation, back", pairs([(), (5,), (2, 3)], (0, *ROTATIONS), [False, True])
)
def test_gradients_of_rotate(leading: tuple[int, ...], rotation: int, back: bool) -> None:
    """Of x and of the factor, against autograd through the matrix in float64."""
    g = torch.Generator().manual_seed(0)
    x, grad = torch.randn(*leading, 128, generator=g), torch.randn(*leading, 128, generator=g)
    factor = torch.rand(128, generator=g) + 0.5
    leaves = [t.clone().requires_grad_() for t in (x, factor)]
    got = torch.autograd.grad(ops.rotate(leaves[0], leaves[1], rotation, back), leaves, grad)
    exact = [t.double().requires_grad_() for t in (x, factor)]
    r = matrix_of(rotation, 128)
    y = exact[0] @ r * exact[1] if back else exact[0] * exact[1] @ r.t()
    expected = torch.autograd.grad(y, exact, grad.double())
    rows = grad[..., 0].numel()
    largest = 64**0.5 * grad.abs().max() * max(x.abs().max(), 1.5) * rows
    for found, e in zip(got, expected, strict=True):
        assert ((found.double() - e).abs() <= (10 + rows) * HALF_ULP * largest).all()
    only_x = leaves[0].detach().requires_grad_()
    (dx,) = torch.autograd.grad(ops.rotate(only_x, factor, rotation, back), only_x, grad)
    assert same_bits(dx, got[0])
