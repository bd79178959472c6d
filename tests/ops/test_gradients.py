"""Gradients of linear_ste against a straight-through oracle in float64. (T1) (T2)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from qfx.ops.code import Code
from qfx.ops.layout import Layout
from qfx.ops.quantize import code_range
from qfx.ops.rotation import transformed_weight
from tests.lib.strategies import BITS, FLAG, LAYOUTS, SEEDS, SIZES, strided
from tests.ops.test_op_rotate import matrix_of

ops = torch.ops.qfx
HALF_ULP = 2.0**-24
LEAVES = ("x", "w", "bias", "x_step", "w_step")


class Problem(NamedTuple):
    """A linear in float32; steps are None where the scale is dynamic."""

    x: Tensor
    w: Tensor
    bias: Tensor | None
    x_step: Tensor | None
    w_step: Tensor | None
    code: Code = Code(symmetric=0)  # with the rotation
    w_code: Code = Code()
    factor: Tensor | None = None

    @property
    def rotation(self) -> int:
        return self.code.rotation

    @property
    def limits(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of the codes of x and of w."""
        return code_range(*self.code[:2]), code_range(*self.w_code[:2])

    def leaves(self) -> dict[str, Tensor]:
        return {n: t for n in LEAVES if isinstance(t := getattr(self, n), Tensor)}


def sizes_of(p: Problem) -> tuple[int, int, int]:
    return p.x[..., 0].numel(), p.x.shape[-1], p.w.shape[0]


def transformed(p: Problem) -> tuple[Tensor, Tensor]:
    """x' and w', which the steps and the codes are of. (R1)"""
    x, w = p.x.detach(), p.w.detach()
    return ops.rotate(x, p.factor, p.rotation), transformed_weight(w, p.factor, p.rotation)


def codes(p: Problem) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(q, scale, zero_point) of both operands."""
    steps = (None if step is None else step.detach() for step in (p.x_step, p.w_step))
    pairs = zip(transformed(p), (p.code._replace(rotation=0), p.w_code), steps, strict=True)
    qx, qw = (ops.quantize(v, code, step) for v, code, step in pairs)
    return qx, qw


def forward(p: Problem, *, frozen: bool = False, seed: Tensor | None = None) -> Tensor:
    (qx, (wq, w_scale, _)), n = codes(p), p.w.shape[0]
    weight = (ops.pack_weight(wq, w_scale), Layout(n))
    code = [*p.code, p.w_code.bits, p.w_code.per_tensor]
    carriers = (p.x, None if frozen else p.w, p.bias, p.x_step, p.w_step)
    return ops.linear_ste(*carriers, list(qx), *weight, code, seed, p.x.dtype, p.factor)


def _round(v: Tensor) -> Tensor:
    return v + (v.round() - v).detach()


def _through(v: Tensor, step: Tensor | None, code: tuple[Tensor, ...], limits: Any) -> Tensor:
    """The quantized operand as a function of v and its step, by autograd in float64."""
    q, scale, zero_point = code
    if step is None:
        return v + ((q.double() - zero_point) * scale.double() - v).detach()
    return _round((v / step).clamp(*limits)) * step


def oracle(p: Problem, grad: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients in float64 of every leaf, and of the sums of absolute terms behind them."""
    leaves = {n: t.detach().double().requires_grad_() for n, t in p.leaves().items()}
    qx, qw = codes(p)
    limits = p.limits
    m, k, n = sizes_of(p)
    f = torch.ones(k).double() if p.factor is None else p.factor.double()
    r = matrix_of(p.rotation, k)
    x, w = leaves["x"] * f @ r.t(), leaves["w"] / f @ r.t()
    x_hat = _through(x, leaves.get("x_step"), qx, limits[0])
    w_hat = _through(w, leaves.get("w_step"), qw, limits[1])
    y = x_hat @ w_hat.t() + leaves.get("bias", 0.0)
    g = grad.double()
    found = torch.autograd.grad(y, list(leaves.values()), g)
    flat = g.reshape(m, n).abs()
    d_x, d_w = g.abs() @ w_hat.abs(), flat.t() @ x_hat.abs().reshape(m, k)
    sizes = {"x": d_x @ r.abs() * f, "w": d_w @ r.abs() / f, "bias": flat.sum(0)}
    if p.x_step is not None:
        sizes["x_step"] = _terms(d_x, x, leaves["x"] * f, r, p.x_step, limits[0][0]).sum()
    if p.w_step is not None:
        terms = _terms(d_w, w, leaves["w"] / f, r, p.w_step, limits[1][0])
        sizes["w_step"] = terms.sum() if p.w_step.numel() == 1 else terms.sum(1, keepdim=True)
    return dict(zip(leaves, found, strict=True)), sizes


def _terms(d: Tensor, v: Tensor, before: Tensor, r: Tensor, step: Tensor, qmin: int) -> Tensor:
    """Bounds |d (codes - v / step)|, v = R before: the codes reach |qmin|, and what cancels in v
    has left its roundings there."""
    cancelled = before.abs() @ r.t().abs() - v.abs()
    return d * (abs(qmin) + (v / step).abs().clamp(max=abs(qmin)) + cancelled / step)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    rotation = draw(st.sampled_from([0, 0, 16, 64]))
    m, k, n = draw(SIZES), draw(SIZES.filter(lambda s: s > 0)), draw(SIZES)
    k = rotation * draw(st.integers(1, 3)) if rotation else k
    g = torch.Generator().manual_seed(draw(SEEDS))
    leading = draw(st.sampled_from([(m,), (1, m), (m, 2)]))
    x = torch.randn(*leading, k, generator=g)
    w = strided(torch.randn(n, k, generator=g), draw(LAYOUTS))
    bias = torch.randn(n, generator=g) if draw(st.booleans()) else None
    x_step = torch.rand(1, generator=g) * 0.05 + 0.005 if draw(st.booleans()) else None
    steps = [None, torch.rand(1, generator=g) + 0.05, torch.rand(n, 1, generator=g) + 0.05]
    w_step = draw(st.sampled_from(steps))
    made = Problem(
        x, w, bias, x_step, w_step,
        Code(draw(BITS), draw(FLAG), draw(FLAG), 0, rotation),
        Code(draw(BITS), 1, draw(FLAG)),
        torch.rand(k, generator=g) + 0.5 if draw(st.booleans()) else None,
    )  # fmt: skip
    assume(not _near_a_limit(made))
    return made


def _near_a_limit(p: Problem) -> bool:
    """Whether float32 and float64 may disagree on what is clipped."""
    x, w = transformed(p)
    pairs = zip((x, w), (p.x_step, p.w_step), p.limits, strict=True)
    return any(
        bool((((v / step) - limit).abs() < 1e-4 * abs(limit)).any())
        for v, step, limits in pairs
        if step is not None
        for limit in limits
    )


def gradients(p: Problem, grad: Tensor, run: Callable[..., Tensor] = forward) -> dict[str, Tensor]:
    leaves = {n: t.detach().clone().requires_grad_() for n, t in p.leaves().items()}
    y = run(p._replace(**leaves))
    return dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), grad), strict=True))


def _gradient_like(shape: tuple[int, ...], layout: str, seed: int) -> Tensor:
    g = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if layout == "expanded":
        return g.new_ones(()).expand(shape)
    return g if layout == "contiguous" else g.transpose(0, -1).contiguous().transpose(0, -1)


GRADIENT_LAYOUTS = st.sampled_from(["contiguous", "transposed", "expanded"])


@given(problems(), GRADIENT_LAYOUTS, SEEDS)
def test_gradients_equal_the_oracle(p: Problem, layout: str, seed: int) -> None:
    """Within the roundings of one float32 matmul and one sum: each of at most
    terms + 8 operations on a sum of absolute terms, and those of (R1), 9 and one division more."""
    shape = (*p.x.shape[:-1], p.w.shape[0])
    grad = _gradient_like(shape, layout, seed)
    got = gradients(p, grad)
    expected, sizes = oracle(p, grad)
    m, k, n = sizes_of(p)
    transforms = p.factor is not None or p.rotation != 0
    terms = {"x": n, "w": m, "bias": m, "x_step": n + m * k, "w_step": m + n * k}
    for name, d in got.items():
        assert d.dtype == torch.float32 and d.shape == getattr(p, name).shape
        bound = (terms[name] + 8 + 10 * transforms) * HALF_ULP * sizes[name] * 1.01
        assert ((d.double() - expected[name]).abs() <= bound).all(), name


@given(problems(), SEEDS)
def test_a_frozen_weight_still_gives_dx(p: Problem, seed: int) -> None:
    """The same bits as with the weight at hand: packed codes and a second quantization agree."""
    p = p._replace(w_step=None)
    grad = _gradient_like((*p.x.shape[:-1], p.w.shape[0]), "contiguous", seed)
    x = p.x.detach().requires_grad_()
    (frozen,) = torch.autograd.grad(forward(p._replace(x=x), frozen=True), x, grad)
    assert torch.equal(frozen, gradients(p, grad)["x"])


@given(problems(), SEEDS)
def test_int8_backward_is_within_a_rounding_step(p: Problem, seed: int) -> None:
    """(T3): stochastic rounding moves an element of the gradient by less than one step of its row,
    so dx by that times the codes it meets."""
    p = p._replace(x_step=None, w_step=None)
    grad = _gradient_like((*p.x.shape[:-1], p.w.shape[0]), "contiguous", seed)
    key = torch.tensor([seed])
    got = gradients(p, grad, lambda q: forward(q, seed=key))
    expected, sizes = oracle(p, grad)
    (q, scale, zero), (wq, w_scale, _) = codes(p)
    m, k, n = sizes_of(p)
    g = grad.reshape(m, n).double()
    codes_x = q.double().reshape(m, k).abs() + zero.double().abs().reshape(-1, 1)
    s = scale.double().reshape(-1, 1).expand(m, 1)
    folded = g * w_scale.double().reshape(1, -1)
    step_x = _largest(folded.abs()) / 127
    step_w = _largest((g * s).t().abs()) / 127
    r, f = matrix_of(p.rotation, k).abs(), 1.0 if p.factor is None else p.factor.double()
    bounds = {
        "x": (step_x * wq.double().abs().sum(0) @ r * f).reshape(p.x.shape),
        "w": step_w * codes_x.sum(0) @ r / f,
    }
    for name, bound in bounds.items():
        slack = bound * 1e-4 + sizes[name] * (m + n + 16) * HALF_ULP * 4 + 1e-30
        assert ((got[name].double() - expected[name]).abs() <= bound + slack).all(), name
    if p.bias is not None:
        assert torch.allclose(got["bias"].double(), expected["bias"], atol=1e-4, rtol=1e-4)


def _largest(a: Tensor) -> Tensor:
    return a.amax(1, keepdim=True) if a.shape[1] else a.new_zeros(a.shape[0], 1)


def test_int8_backward_is_unbiased_and_reproducible() -> None:
    """The mean over seeds is the float gradient, z < 5 for each element; one seed, one result."""
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(6, 20, generator=g), torch.randn(5, 20, generator=g)
    p = Problem(x, w, None, None, None)
    grad = torch.randn(6, 5, generator=g)
    runs = [
        gradients(p, grad, lambda q, s=s: forward(q, seed=torch.tensor([s]))) for s in range(600)
    ]
    again = gradients(p, grad, lambda q: forward(q, seed=torch.tensor([0])))
    expected, _ = oracle(p, grad)
    for name in ("x", "w"):
        assert torch.equal(again[name], runs[0][name])
        stack = torch.stack([r[name] for r in runs]).double()
        error = (stack.mean(0) - expected[name]).abs()
        assert (error <= 5 * stack.std(0) / 600**0.5 + 1e-6 * stack.abs().amax()).all()
        assert (stack.std(0) > 0).any()


def test_the_two_int8_products_round_apart() -> None:
    """Where x is w and the gradient its own transpose, the same bits would give the same result."""
    g = torch.Generator().manual_seed(0)
    x, grad = torch.randn(6, 20, generator=g), torch.randn(6, 6, generator=g)
    p, grad = Problem(x, x.clone(), None, None, None, Code()), grad + grad.t()
    got = gradients(p, grad, lambda q: forward(q, seed=torch.tensor([0])))
    expected, _ = oracle(p, grad)
    assert torch.equal(expected["x"], expected["w"]) and not torch.equal(got["x"], got["w"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_have_the_type_of_their_tensors(dtype: torch.dtype) -> None:
    x, w, bias = torch.randn(3, 8), torch.randn(4, 8), torch.randn(4)
    p = Problem(*(t.to(dtype) for t in (x, w, bias)), None, None)  # type: ignore[arg-type]
    got = gradients(p, torch.ones(3, 4, dtype=dtype))
    assert {d.dtype for d in got.values()} == {dtype}
    expected = torch.ones(3, 4, dtype=torch.float64) @ p.w.double()
    step = p.w.double().abs().amax() / 127 + 4 * torch.finfo(dtype).eps * 4
    assert ((got["x"].double() - expected).abs() <= 4 * step).all()


@pytest.mark.parametrize("name", ["x", "w", "bias"])
def test_only_what_is_asked_for(name: str) -> None:
    p = Problem(torch.randn(3, 8), torch.randn(4, 8), torch.randn(4), None, None, Code())
    leaf = getattr(p, name).requires_grad_()
    assert torch.autograd.grad(forward(p).sum(), leaf)[0].shape == leaf.shape


def test_the_caller_gradient_is_not_changed() -> None:
    p = Problem(torch.randn(3, 8), torch.randn(4, 8), None, None, None, w_code=Code(per_tensor=1))
    grad = torch.randn(3, 4)
    before = grad.clone()
    gradients(p, grad)
    assert torch.equal(grad, before)


def test_saved_activations_are_int8() -> None:
    """What autograd keeps of x: its codes, a quarter of float32, and 8 bytes a row."""
    x, w = torch.randn(64, 256), torch.randn(32, 256, requires_grad=True)
    p = Problem(x, w, None, None, None)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        forward(p)
    sizes = [t.numel() * t.element_size() for t in kept if t is not w]
    assert sum(sizes) == 64 * 256 + 64 * 8


@pytest.mark.parametrize("with_step, kept_bytes", [(False, 0), (True, 64 * 256 * 5 + 64 * 8 + 4)])
def test_what_a_frozen_weight_keeps_of_x(with_step: bool, kept_bytes: int) -> None:
    """Nothing, but for a step: x, its codes with 8 bytes a row, and the step itself."""
    x, w = torch.randn(64, 256, requires_grad=True), torch.randn(32, 256)
    step = torch.tensor([0.02]) if with_step else None
    p, kept = Problem(x, w, None, step, None, Code()), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        forward(p, frozen=True)
    weight = len(ops.pack_weight(torch.ones(32, 256).char(), torch.ones(32)))
    sizes = [t.numel() * t.element_size() for t in kept]
    assert weight in sizes and sum(sizes) - weight == kept_bytes


def test_a_weight_that_trains_has_one_scale_for_each_row() -> None:
    x, w = torch.randn(3, 64), torch.randn(4, 64, requires_grad=True)
    codes, zeros = list(ops.quantize(x, Code())), torch.ones(4, 1).int()
    weight = ops.pack_weight(torch.ones(4, 64).char(), torch.ones(4, 1), zeros)
    how = (codes, weight, Layout(4, shift=1), [*Code(), 8, 0], None, torch.float32)
    with pytest.raises(ValueError, match=r"the weight has the layout \[4, 8, 0, 0, 1\]; a weight"):
        ops.linear_ste(x, w, None, None, None, *how)


def test_second_derivatives_are_an_error() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    p = Problem(x, torch.randn(4, 8), None, None, None, Code())
    with pytest.raises(NotImplementedError, match="linear_ste has no second derivative"):
        torch.autograd.grad(forward(p).square().sum(), p.x, create_graph=True)


def test_tangents_are_an_error() -> None:
    p = Problem(torch.randn(3, 8), torch.randn(4, 8), None, None, None, Code())
    with pytest.raises(NotImplementedError, match="argument 0 carries a forward-mode tangent"):
        torch.func.jvp(lambda x: forward(p._replace(x=x)), (p.x,), (torch.ones_like(p.x),))


def test_a_step_moves_with_its_finite_difference() -> None:
    """Inside a rounding cell and outside the range y is linear in the step. (T2)"""
    g = torch.Generator().manual_seed(1)
    x, w = torch.randn(40, 24, generator=g), torch.randn(8, 24, generator=g)
    steps = torch.tensor([0.013]), torch.full((8, 1), 0.02)
    p = Problem(x, w, None, *steps, Code())
    frozen_x, frozen_w = codes(p)
    grad = torch.randn(40, 8, generator=g)
    got = gradients(p, grad)

    def smooth(x_step: Tensor, w_step: Tensor) -> Tensor:
        """The codes stay where they were, so only clipped elements and offsets move."""
        x_hat = _cell(p.x, frozen_x[0], x_step, p.x_step)
        return ((x_hat @ _cell(p.w, frozen_w[0], w_step, p.w_step).t()) * grad).sum()

    moving = [s.double().requires_grad_() for s in steps]
    for d, name in zip(torch.autograd.grad(smooth(*moving), moving), LEAVES[3:], strict=True):
        assert torch.allclose(got[name].double(), d, rtol=1e-4)


def _cell(v: Tensor, q: Tensor, step: Tensor, at: Tensor | None) -> Tensor:
    """v^ near `at`: round(v / s) - v / s is constant inside a cell, the code is outside."""
    assert at is not None
    inside = (v / at).abs() <= 127
    offset = (q.double() - v.double() / at.double()) * step
    return torch.where(inside, v.double() + offset, q.double() * step)
