"""The gradients of int8 attention, (A11) to (A14): against those of exact attention in float64, on
every instruction set, with every mask and layout; and by autograd."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qfx.ops import REFERENCES
from qfx.ops.attention_backward import score_gradients
from qfx.ops.heads import added, matched
from tests.conftest import on_isa, on_threads, same_bits
from tests.lib.strategies import ISAS
from tests.ops.test_attention_seen import Case, cases

OPS = torch.ops.qfx
CLOSE = 0.995  # cosine
NAMES = ("q", "k", "v")
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def whole(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """The operands with the batch axes that the operator asks for."""
    q, _, _ = matched(*case[:3])
    batch = torch.broadcast_shapes(case.k.shape[:-2], case.v.shape[:-2])
    k, v = (t.expand(*batch, *t.shape[-2:]) for t in (case.k, case.v))
    return q, k, v


def gradients(case: Case, grad: Tensor, op: Any = OPS.int8_attention_backward) -> Any:
    q, k, v = whole(case)
    return op(grad, q, k, v, case.mask, q.shape[-1] ** -0.5, case.causal)


def exact(case: Case, grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of attention in float64."""
    leaves = [t.double().requires_grad_() for t in whole(case)]
    q, k, v = matched(*leaves)
    b = added(case.mask, case.causal, q.shape[-2], k.shape[-2]).double()
    p = (q @ k.mT * q.shape[-1] ** -0.5 + b).softmax(-1).nan_to_num(0)
    return torch.autograd.grad(p @ v, leaves, grad.double())


def cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.double().ravel(), b.double().ravel()
    return 1.0 if not a.any() and not b.any() else float(torch.cosine_similarity(a, b, 0))


def case_of(
    m: int = 128, n: int = 128, d: int = 64, heads: int = 2, causal: bool = False, seed: int = 0
) -> tuple[Case, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    q, grad = (torch.randn(1, heads, m, d, generator=draw) for _ in range(2))
    k, v = (torch.randn(1, heads, n, d, generator=draw) for _ in range(2))
    return Case(q, k, v, None, causal), grad


@given(ISAS, cases(), st.integers(1, 3))
def test_bits_do_not_depend_on_processor_threads_and_layout(
    isa: str, case: Case, threads: int
) -> None:
    grad = torch.randn(*matched(*case[:3])[0].shape[:-1], case.v.shape[-1]).to(case.q.dtype)
    with on_isa("ref"), on_threads(1):
        expected = gradients(case, grad)
    plain = Case(*(t.contiguous() for t in case[:3]), case.mask, case.causal)
    with on_isa(isa), on_threads(threads):
        for found in (gradients(case, grad.mT.contiguous().mT), gradients(plain, grad)):
            assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
    of_reference = gradients(case, grad, REFERENCES["int8_attention_backward"])
    for found, close in zip(expected, of_reference, strict=True):
        error, norm = (t.double().norm() for t in (found.double() - close.double(), close))
        assert error <= 0.02 * norm + 1e-5


@given(ISAS, cases())
def test_within_the_bounds(isa: str, case: Case) -> None:
    """(A15), of heads that share nothing."""
    q, k, v = (t.contiguous() for t in matched(*case[:3]))
    case = Case(q, k, v, case.mask, case.causal)
    grad = torch.randn(*q.shape[:-1], v.shape[-1]).to(q.dtype)
    scale = q.shape[-1] ** -0.5
    w, inverse, ds = score_gradients(grad, q, k, v, case.mask, scale, case.causal)
    with on_isa(isa):
        found = gradients(case, grad)
    given = (t.double() for t in (w, inverse, ds, q, k, grad))
    w, inverse, ds, q, k, g = given
    k = k - k.mean(-2, keepdim=True)
    f, h = (_step(t, -1) * inverse * more for t, more in ((w, 1.0), (ds, scale)))
    exact = (
        (scale * inverse * ds) @ k,
        (scale * inverse * ds).mT @ q,
        (inverse * w).mT @ g,
    )
    bounds = (
        h * (k.abs().sum(-2, keepdim=True) / 2 + _codes(ds) @ _step(k, -2).expand_as(k) / 2),
        _contraction(h * q, ds),
        _contraction(f * g, w),
    )
    terms = (
        (scale * inverse * ds).abs() @ k.abs(),
        (scale * inverse * ds).abs().mT @ q.abs(),
        (inverse * w).mT @ g.abs(),
    )
    slack = (q.shape[-2] + k.shape[-2] + 64) * 2.0**-24 + ROUNDOFF[case.q.dtype]
    for a, b, bound, of_terms in zip(found, exact, bounds, terms, strict=True):
        limit = 1.01 * bound + slack * (of_terms + bound) + 1e-7
        assert ((a.double() - b).abs() <= limit).all()


def _step(x: Tensor, axis: int) -> Tensor:
    return x.abs().amax(axis, keepdim=True) / 127


def _codes(x: Tensor) -> Tensor:
    """The magnitudes of codes of rows."""
    return (x.abs() / _step(x, -1).clamp_min(1e-300)).round()


def _contraction(x: Tensor, of: Tensor) -> Tensor:
    """The bound of a sum over rows of the codes of x and of those of `of`, 64 rows at a time."""
    bound = x.new_zeros(*of.shape[:-2], of.shape[-1], x.shape[-1])
    for rows, codes in zip(x.split(64, -2), _codes(of).split(64, -2), strict=True):
        ones = torch.ones_like(codes)
        bound += ones.mT @ rows.abs() / 2 + codes.mT @ _step(rows, -2).expand_as(rows) / 2
    return bound


def _outliers(x: Tensor, features: int = 2, factor: float = 30.0) -> Tensor:
    x = x.clone()
    x[..., :features] *= factor
    return x


SHAPES: dict[str, Any] = {
    "plain": lambda q, k, v, g: (q, k, v, g),
    "outliers in features of queries": lambda q, k, v, g: (_outliers(q) / 9, k, v, g),
    "outliers in features of keys": lambda q, k, v, g: (q / 9, _outliers(k), v, g),
    "keys with a common offset": lambda q, k, v, g: (q, k + 20 * k[..., :1, :], v, g),
    "values with a common offset": lambda q, k, v, g: (q, k, v + 20 * v[..., :1, :], g),
    "gradients with outliers": lambda q, k, v, g: (q, k, v, _outliers(g)),
    "one gradient row far above": lambda q, k, v, g: (q, k, v, _outliers(g.mT, 1, 100).mT),
    "peaked": lambda q, k, v, g: (4 * q, k, v, g),
    "flat": lambda q, k, v, g: (q / 50, k, v, g),
    "small": lambda q, k, v, g: (q, k, v, 1e-6 * g),
    "large": lambda q, k, v, g: (q, k, v, 1e6 * g),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [64, 300])
@pytest.mark.parametrize("shape", SHAPES)
def test_close_to_the_gradients_of_exact_attention(shape: str, n: int, causal: bool) -> None:
    """By cosine and norm. That of peaked attention, whose scores are large, depends on the codes of
    queries and keys, as its forward pass does."""
    case, grad = case_of(n, n, causal=causal)
    q, k, v, grad = SHAPES[shape](*case[:3], grad)
    case = Case(q, k, v, None, causal)
    for name, a, b in zip(NAMES, gradients(case, grad), exact(case, grad), strict=True):
        assert cosine(a, b) >= (0.97 if shape == "peaked" else CLOSE), name
        assert abs(float(a.double().norm() / b.norm()) - 1) < 0.03, name


def test_long_sequences() -> None:
    case, grad = case_of(300, 3000, heads=1)
    for a, b in zip(gradients(case, grad), exact(case, grad), strict=True):
        assert cosine(a, b) >= CLOSE


@given(cases())
def test_by_autograd_it_is_the_operator(case: Case) -> None:
    """With heads that are shared or broadcast in either operand: gradients of their shapes, and
    nothing but q, k, v and the mask is kept."""
    leaves = [t.detach().requires_grad_() for t in case[:3]]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = OPS.int8_attention(
            *leaves, case.mask, case.q.shape[-1] ** -0.5, case.causal, case.q.dtype
        )
    assert len(kept) == 3 + (case.mask is not None)
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, leaves, grad)
    for leaf, each, a in zip(leaves, found, gradients(case, grad), strict=True):
        assert each.shape == leaf.shape and each.dtype == leaf.dtype
        assert same_bits(each, a.sum_to_size(leaf.shape))


def test_several_queries_share_a_head_of_keys() -> None:
    """The gradients of shared keys and values are sums over the queries."""
    draw = torch.Generator().manual_seed(0)
    q, grad = (torch.randn(2, 6, 40, 32, generator=draw) for _ in range(2))
    k, v = (torch.randn(2, 2, 50, 32, generator=draw) for _ in range(2))
    case = Case(q, k, v, None, False)
    alone = Case(q, *(t.repeat_interleave(3, 1) for t in (k, v)), None, False)
    dq, *shared = gradients(case, grad)
    of_each = gradients(alone, grad)
    assert same_bits(dq, of_each[0])
    for a, b in zip(shared, of_each[1:], strict=True):
        assert torch.allclose(a, b.unflatten(1, (2, 3)).sum(2), rtol=1e-5, atol=1e-5)


def test_rows_and_keys_that_are_not_seen() -> None:
    """A row that sees no key has no gradient, and a key that no row sees neither, whatever is in
    it; who sees a fault is NaN."""
    case, grad = case_of(40, 70)
    mask = torch.ones(40, 70, dtype=torch.bool)
    mask[7] = False
    mask[:, 11] = False
    masked = case._replace(mask=mask)
    dq, dk, dv = gradients(masked, grad)
    assert not dq[..., 7, :].any() and not dk[..., 11, :].any() and not dv[..., 11, :].any()
    for fault in (math.nan, math.inf):
        k, v = case.k.clone(), case.v.clone()
        k[..., 11, 3] = v[..., 11, 5] = fault
        faulty = gradients(masked._replace(k=k, v=v), grad)
        assert all(t.isfinite().all() for t in faulty)
        k[..., 12, 3] = fault
        assert gradients(masked._replace(k=k), grad)[0][..., 0, :].isnan().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("place", range(4))
def test_faults_show_where_the_reference_has_them(place: int, causal: bool) -> None:
    """In q, k, v and the gradient."""
    case, grad = case_of(20, 30, 16, causal=causal)
    tensors = [*(t.clone() for t in case[:3]), grad.clone()]
    tensors[place][0, 1, 5, 3] = math.nan
    q, k, v, grad = tensors
    faulty = Case(q, k, v, None, causal)
    of_reference = gradients(faulty, grad, REFERENCES["int8_attention_backward"])
    for a, b in zip(gradients(faulty, grad), of_reference, strict=True):
        assert torch.equal(a.isnan(), b.isnan()) and a[0, 0].isfinite().all()
    assert any(t.isnan().any() for t in of_reference)


def test_refusals() -> None:
    case, grad = case_of(8, 8)
    mask = torch.zeros(8, 8, requires_grad=True)
    leaves = [t.requires_grad_() for t in case[:3]]
    with pytest.raises(NotImplementedError, match="mask no gradient"):
        OPS.int8_attention(*leaves, mask, 1.0, False, torch.float32)
    y = OPS.int8_attention(*leaves, None, 1.0, False, torch.float32)
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(y.sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="expected grad and q with all batch axes"):
        OPS.int8_attention_backward(grad[:, :1], *case[:3], None, 1.0, False)
