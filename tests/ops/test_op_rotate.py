"""The laws of the transform of K (R1), on every instruction set of this machine."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import qfx._C as _C
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
R2 = torch.tensor([[1, 1], [-1, 1]]).double() / 2**0.5
R4 = torch.tensor([[1, 1, 1, -1], [-1, 1, 1, 1], [-1, -1, 1, -1], [1, -1, 1, 1]]).double()
HALF_ULP, SMALLEST = 2.0**-24, 2.0**-149
TAME = tuple(f for f in FINITE if f not in ("huge", "largest"))  # sums do not overflow


def block_of(size: int) -> Tensor:
    """R of one block as a float64 matrix [size, size]."""
    block = R2 if size.bit_length() % 2 == 0 else torch.eye(1).double()
    while len(block) < size:
        block = torch.kron(block, R4 / 2)
    return block


def matrix_of(rotation: int, k: int) -> Tensor:
    """R as a float64 matrix [K, K]."""
    if not k or not rotation:
        return torch.eye(k).double()
    rest = [2**i for i in reversed(range(6)) if k % rotation & 2**i]
    sizes = [rotation] * (k // rotation) + rest
    return torch.block_diag(*map(block_of, sizes))


@st.composite
def problems(draw: st.DrawFn, fills: tuple[str, ...]) -> tuple[Tensor, Tensor | None, int]:
    """x [M, K] of any layout, a factor or None, a rotation, which divides K or does not."""
    rotation = draw(st.sampled_from((0, *ROTATIONS)))
    whole = draw(st.booleans())
    k = rotation * draw(st.sampled_from([0, 1, 2, 3, 9])) if whole else draw(SIZES)
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


@pytest.mark.parametrize("rotation, isa", pairs(ROTATIONS, _C.isas()), indirect=["isa"])
def test_every_k_is_rotated(rotation: int, isa: str) -> None:
    """Against the reference, there and back, with the rest of K in blocks of every size."""
    x_mk = torch.randn(2, 1153, generator=torch.Generator().manual_seed(0))
    factor_k = torch.linspace(0.5, 2, 1153)
    for k in (*range(401), 480, 511, 513, 672, 1000, 1153):
        x, factor = x_mk[:, :k].contiguous(), factor_k[:k].contiguous()
        for back in (False, True):
            got = ops.rotate(x, factor, rotation, back)
            assert same_bits(got, REFERENCES["rotate"](x, factor, rotation, back)), k


@given(problems(TAME), st.integers(0, 300))
def test_rotation_keeps_norms_and_is_turned_back(
    problem: tuple[Tensor, Tensor | None, int], cut: int
) -> None:
    """(B4) for each element of a block of b elements of norm v: 8 * 2^-24 v there, and on the way
    back the same, besides what the errors of the first become, sqrt(b) times as much at most."""
    x, _, rotation = problem
    y = ops.rotate(x, None, rotation)
    norm = x.double().norm(dim=1, keepdim=True)
    tolerance = 8 * HALF_ULP * norm * 1.01 + 64 * SMALLEST
    assert (
        (y.double().norm(dim=1, keepdim=True) - norm).abs() <= x.shape[1] ** 0.5 * tolerance
    ).all()
    back = ops.rotate(y, None, rotation, True)
    assert ((back - x).double().abs() <= (1 + rotation**0.5) * tolerance).all()
    if rotation and cut % rotation == 0:  # between blocks, so that parts of K can be rotated alone
        parts = [ops.rotate(part, None, rotation) for part in (x[:, :cut], x[:, cut:])]
        assert same_bits(y, torch.cat(parts, 1))


def noise_db(rotation: int, k: int) -> float:
    """Noise of codes against signal, of normal rows in which one channel of a hundred is 30 times
    as large."""
    generator, power = torch.Generator().manual_seed(k), 0.0
    for _ in range(20):
        x_mk = torch.randn(256, k, generator=generator)
        x_mk[:, torch.randperm(k, generator=generator)[: max(1, k // 100)]] *= 30
        turned = ops.rotate(x_mk, None, rotation)
        q, scale, zero_point = ops.quantize(turned, list(Code(symmetric=0)))
        error = (q.float() - zero_point) * scale - turned
        power += (error.square().sum() / x_mk.square().sum()).item()
    return 10 * math.log10(power / 20)


@pytest.mark.parametrize("k", [24, 40, 80, 112, 120, 240, 480])
def test_channels_of_mobile_networks_lose_no_more_than_512(k: int) -> None:
    """Rotated, K = 512 has -43.3 dB of noise and these from -42.6 (480) to -48.8 (24); without a
    rotation they have 4 dB (24) to 11 dB (480) more. In blocks of 16, 480 has 3 dB more."""
    noise = noise_db(64, k)
    assert noise < noise_db(64, 512) + 1
    assert noise < noise_db(0, k) - 3.5
    assert noise < noise_db(16, k) - 1 or k < 64


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
