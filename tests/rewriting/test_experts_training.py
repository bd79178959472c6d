"""Products of experts in graphs that record gradients: int8, with the gradients of experts one by
one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

import qfx
from qfx.ops.code import Code, code_of
from qfx.ops.forms import EXPERTS, EXPERTS_STE, ste_code
from qfx.ops.layout import Layout
from tests.conftest import same_bits
from tests.rewriting.test_experts import ENDS, Experts, K, N, fallback, grouped, inputs, unnamed

ops = torch.ops.qfx
GRAD = torch.randn(ENDS[-1], N, generator=torch.Generator().manual_seed(2))
SPELLINGS = [(grouped, torch.bfloat16), (unnamed, torch.bfloat16), (fallback, torch.float32)]


def compiled(model: Experts, **options: Any) -> Any:
    options = {"minimum_gain": 0, "inner": "aot_eager", **options}
    return torch.compile(model, backend="qfx", options=options, fullgraph=True)


def step(f: Any, model: Experts, ends: tuple[int, ...] = ENDS) -> list[Tensor]:
    """Returns y, and the gradients of x and of the weights if these train."""
    x, _ = inputs(model.weight.dtype)
    x = x[: ends[-1]].requires_grad_()
    y = f(x, torch.tensor(ends, dtype=torch.int32))
    leaves = [leaf for leaf in (x, model.weight) if leaf.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, leaves, GRAD[: ends[-1]].to(y.dtype))]


def one_by_one(model: Experts, scheme: str, ends: tuple[int, ...] = ENDS) -> list[Tensor]:
    """The same by linear_ste for each expert. All codes of x are computed at once."""
    (x, _), weights, chosen = inputs(model.weight.dtype), model.weight.detach(), of(scheme)
    x, dtype, rotation = x[: ends[-1]], model.weight.dtype, chosen.block(K)
    of_w = list(Code(chosen.w.bits, rotation=rotation))
    y, dx, dw = [], [], torch.zeros_like(weights)
    triple = ops.quantize.default(x, code_of(chosen.x, rotation))  # type: ignore[arg-type]
    for e, (begin, end) in enumerate(pairwise((0, *ends))):
        w = weights[e] if model.transposed else weights[e].t()
        w, part = w.detach().requires_grad_(), x[begin:end].detach().requires_grad_()
        packed = ops.pack_weight.default(*ops.quantize.default(w.detach(), of_w)[:2])
        how = (packed, list(Layout(N)), ste_code(chosen, rotation), None, dtype)
        codes = [t[begin:end] for t in triple]
        y.append(ops.linear_ste.default(part, w, None, None, None, codes, *how))
        found = torch.autograd.grad(y[-1], (part, w), GRAD[begin:end].to(dtype))
        dx.append(found[0])
        dw[e] = found[1] if model.transposed else found[1].t()
    return [torch.cat(y).detach(), torch.cat(dx), dw]


def of(scheme: str) -> qfx.Scheme:
    return qfx.Config(scheme=scheme).chosen


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-symmetric", "w8a8-tensor", "w7a7"])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(("multiply", "dtype"), SPELLINGS)
def test_it_has_the_gradients_of_linears(
    multiply: Any, dtype: torch.dtype, transposed: bool, scheme: str
) -> None:
    """Of x and the weights, bit for bit; the second expert has no rows."""
    model = Experts(multiply, transposed, dtype)
    found = step(compiled(model, scheme=scheme), model)
    assert all(map(same_bits, found, one_by_one(model, scheme)))
    assert not found[2][1].any() and found[2].stride() == model.weight.stride()


def targets(model: Experts, **options: Any) -> list[Any]:
    """Returns what a training graph of the model calls."""
    config = qfx.Config(minimum_gain=0, **options)
    gm, plan = qfx.rewrite(qfx.trace(model, *inputs(model.weight.dtype)), config, training=True)
    assert "1 of 1 matmuls in int8" in str(plan), plan
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def test_the_operator_depends_on_what_trains() -> None:
    """Weights that do not are packed once; an int8 backward needs a seed."""
    model = Experts(fallback, True, torch.float32)
    assert EXPERTS_STE.operator in targets(model)
    model.requires_grad_(False)
    found = targets(model)
    assert EXPERTS.operator in found and ops.quantize.default not in found
    found = targets(model, backward="int8")
    assert EXPERTS_STE.operator in found and torch.randint in found


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-groups", "w4a8"])
def test_frozen_weights_have_the_gradient_of_linears(scheme: str) -> None:
    model = Experts(fallback, True, torch.float32).requires_grad_(False)
    (x, _), parts = inputs(), []
    for linear, (begin, end) in zip(model.linears(scheme), pairwise((0, *ENDS)), strict=True):
        part = x[begin:end].detach().requires_grad_()
        parts.append(torch.autograd.grad(linear(part), part, GRAD[begin:end])[0])
    _, dx = step(compiled(model, scheme=scheme), model)
    assert same_bits(dx, torch.cat(parts))


@pytest.mark.parametrize("trains", [True, False])
def test_int8_backward(trains: bool) -> None:
    """Near the float backward, the same again with the same seed, another with another."""
    model = Experts(fallback, True, torch.float32).requires_grad_(trains)
    exact = step(compiled(model), model)
    f, runs = compiled(model, backward="int8"), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(step(f, model))
    for first, again, other, wanted in zip(*runs, exact, strict=True):
        assert same_bits(first, again) and qfx.sqnr(wanted, first) > 30
        assert first is runs[0][0] or not same_bits(first, other)


@pytest.mark.parametrize("scheme", ["w8a8-groups", "w4a8"])
def test_schemes_whose_weights_do_not_train(scheme: str) -> None:
    """They stay float, and the plan says why."""
    model = Experts(fallback, True, torch.float32)
    config = qfx.Config(minimum_gain=0, scheme=scheme)
    _, plan = qfx.rewrite(qfx.trace(model, *inputs()), config, training=True)
    assert plan.quantized == 0
    assert "no gradient to the weight, which trains" in plan.entries[0].reason
    assert all(map(torch.equal, step(compiled(model, scheme=scheme), model), step(model, model)))


def _checkpointed(model: Experts) -> Any:
    f = compiled(model)
    return lambda *given: checkpoint(f, *given, use_reentrant=False)


def _by_inductor(model: Experts) -> Any:
    return compiled(model, inner="inductor")


def _dynamic(model: Experts) -> Any:
    options = {"minimum_gain": 0, "inner": "aot_eager"}
    f = torch.compile(model, backend="qfx", options=options, fullgraph=True, dynamic=True)
    step(f, model, (1, 2, 3))  # compiled for other rows
    return f


def _rewritten(model: Experts) -> Any:
    """A backend of its own, whose graph has the weights as inputs."""

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        return qfx.rewrite(gm, qfx.Config(minimum_gain=0))[0].forward

    return torch.compile(model, backend=backend)


@pytest.mark.parametrize("way", [_checkpointed, _by_inductor, _dynamic, _rewritten])
def test_all_ways_have_the_same_gradients(way: Any) -> None:
    model = Experts(fallback, True, torch.float32)
    expected = step(compiled(model), model)
    assert all(map(same_bits, step(way(model), model), expected))


def test_rows_that_one_expert_has_and_none() -> None:
    """One expert has all rows; then there are none."""
    model = Experts(fallback, False, torch.float32)
    f = compiled(model, scheme="w8a8")
    for ends in ((0, 9, 9), (0, 0, 0)):
        found, expected = step(f, model, ends), one_by_one(model, "w8a8", ends)
        assert all(map(same_bits, found, expected))


def test_a_weight_that_an_optimizer_changes_is_quantized_again() -> None:
    model = Experts(fallback, True, torch.float32)
    f = compiled(model)
    before = step(f, model)[0]
    with torch.no_grad():
        model.weight[0].mul_(2.0)
    after = step(f, model)[0]
    assert same_bits(after[:7], 2 * before[:7]) and same_bits(after[7:], before[7:])


def test_second_derivatives_are_an_error() -> None:
    model = Experts(fallback, True, torch.float32)
    x, offsets = inputs()
    y = compiled(model, inner="eager")(x.requires_grad_(), offsets)
    with pytest.raises(NotImplementedError, match="linear_experts_ste has no second derivative"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)
