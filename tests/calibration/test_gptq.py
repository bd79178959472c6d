"""What GPTQ promises of the codes that it finds, (Q8) to (Q10)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qfx import PER_TENSOR, QSpec
from qfx.calibration.gptq import Hessian, ordered, rounded_codes
from qfx.ops.quantize import code_range
from qfx.ops.single_tensors import dequantize, quantize
from tests.lib.bounds import U32
from tests.lib.live_bytes import most_bytes
from tests.lib.pairs import every
from tests.lib.rounded import operands

SPECS = [
    QSpec(),
    QSpec(bits=2),
    QSpec(bits=4, axes=PER_TENSOR),
    QSpec(bits=5, symmetric=False),
    QSpec(bits=4, group=64),
    QSpec(bits=3, symmetric=False, group=128),
]
SHAPES = [(1, 1), (3, 7), (40, 129), (5, 300), (129, 64), (0, 5), (2, 0)]
MANY = (129, 64)  # rows, of which some are worse unless that is seen


def moments(*batches: Tensor) -> Hessian:
    found = Hessian(batches[0].shape[-1])
    for batch in batches:
        found.update(batch)
    return found


def loss(w: Tensor, codes: Tensor, spec: QSpec, h: Hessian) -> Tensor:
    """d H d^T of each row, in float64."""
    d = w.double() - dequantize(quantize(w, spec)._replace(codes=codes)).double()
    return ((d @ h.h_kk.double()) * d).sum(1)


@pytest.mark.parametrize(
    "shape, spec", [*every(SHAPES, SPECS), *((MANY, spec) for spec in SPECS)], ids=str
)
def test_no_row_is_worse_than_rounded_to_nearest(shape: tuple[int, int], spec: QSpec) -> None:
    """Up to the float32 rounding of sums of K^2 terms in the comparison."""
    w, x = operands(*shape)
    h, nearest = moments(x), quantize(w, spec).codes
    codes = rounded_codes(w, spec, ordered(h))
    qmin, qmax = code_range(spec.bits, spec.symmetric)
    assert codes.dtype == torch.int8 and codes.shape == w.shape
    assert ((codes >= qmin) & (codes <= qmax)).all()
    before, after = loss(w, nearest, spec, h), loss(w, codes, spec, h)
    assert (after <= before * (1 + 2 * (shape[1] + 2) * 2.0**-24)).all()
    if min(shape) > 3 and spec.bits > 2:
        assert after.sum() < 0.8 * before.sum()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_codes_are_the_nearest_to_what_is_left_to_them(spec: QSpec) -> None:
    """(Q9) by what it means: of all that the columns behind could be, the error that is least. Up
    to the float32 rounding of sums of K terms, in rows that are not the nearest."""
    k = 150
    w, x = operands(12, k)
    h = moments(x)
    order = ordered(h)
    codes, near = rounded_codes(w, spec, order), quantize(w, spec)
    rows = (codes != near.codes).any(1)
    assert rows.sum() > 6
    damped = h.h_kk.double() + torch.eye(k) * h.damping * h.h_kk.double().diagonal().mean()
    d = w.double() - dequantize(near._replace(codes=codes)).double()
    qmin, qmax = code_range(spec.bits, spec.symmetric)
    for i in range(k):
        at, before, left = order.columns[i], order.columns[:i], order.columns[i:]
        ways = torch.linalg.solve(damped[left][:, left], damped[left][:, before]).t()[:, 0]
        g = int(at) // spec.group if spec.group else 0
        scale, zero = near.scale[:, g].double(), near.zero_point[:, g]
        wanted = (w[:, at] + d[:, before] @ ways) / scale + zero
        slack = (k + 8) * U32 * ((d[:, before].abs() @ ways.abs() + w[:, at].abs()) / scale + qmax)
        off = (codes[:, at] - wanted.clamp(qmin, qmax)).abs()
        assert (off <= 0.5 + slack)[rows].all()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_inputs_without_correlation_give_the_nearest_codes(spec: QSpec) -> None:
    """Bit for bit, whatever the powers of the features; none of inputs that were never seen."""
    w, _ = operands(33, 130)
    for power in (torch.ones(130), torch.rand(130), torch.zeros(130)):
        codes = rounded_codes(w, spec, ordered(moments(torch.diag(power))))
        assert torch.equal(codes, quantize(w, spec).codes)


def test_one_column_makes_good_the_error_of_another() -> None:
    """Two features that are always alike: the sum of their weights counts, 1.4 in steps of 1."""
    w, x = torch.tensor([[127.0, 0.7, 0.7]]), torch.tensor([[1.0, 0, 0], [0, 1, 1]])
    codes = rounded_codes(w, QSpec(), ordered(moments(x.repeat(300, 1))))
    assert codes.sum() == 128 and quantize(w, QSpec()).codes.sum() == 129


def test_faulty_rows_change_no_other() -> None:
    """Of the weight, which are 0 (Q4), and of the inputs, which do not count."""
    w, x = operands(4, 70)
    faulty = torch.cat([x[:1] * torch.nan, x[:1] * torch.inf, torch.full((1, 70), 1e20)])
    order, once, twice = ordered(moments(x)), moments(x), moments(x, faulty)
    assert torch.equal(once.h_kk, twice.h_kk) and once.rows == twice.rows == len(x)
    broken = w.clone()
    broken[1, 3], broken[2, 5] = torch.nan, torch.inf
    wanted = rounded_codes(w, QSpec(), order)
    wanted[1:3] = 0
    assert torch.equal(rounded_codes(broken, QSpec(), order), wanted)


def test_features_that_are_copies_have_a_factor() -> None:
    """A matrix of rank 1, which the damping makes one that has."""
    w, _ = operands(8, 200)
    h, spec = moments(torch.full((1, 200), 1e12)), QSpec(bits=4)
    before = loss(w, quantize(w, spec).codes, spec, h)
    assert loss(w, rounded_codes(w, spec, ordered(h)), spec, h).sum() < 0.1 * before.sum()


@pytest.mark.parametrize(("rows", "damping"), [(0, 1.0), (8, 1.0), (160, 0.1), (10**6, 0.01)])
def test_damping_is_what_few_rows_do_not_know(rows: int, damping: float) -> None:
    h = Hessian(16)
    h.rows = rows
    assert h.damping == damping


def test_a_large_k_takes_two_matrices_in_float64() -> None:
    """Beside the moments: of 11008 features each of the two is 1 GB."""
    k = 200
    h = moments(operands(1, k)[1])
    assert most_bytes(lambda: ordered(h)) <= 2 * 8 * k**2 + 64 * k
