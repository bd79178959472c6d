"""Training: types, symbolic shapes, seeds of the int8 backward, modes of Inductor."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import qfx
from tests.lib.models import compiled
from tests.lib.training import (
    BATCH,
    NEXT,
    Function,
    Gradients,
    Language,
    Two,
    collected,
    near,
    new,
    of_x_too,
    same,
)


def _autocast() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("way", ["autocast", "autocast inside", "bfloat16"])
def test_types_are_those_of_float(way: str) -> None:
    """Of outputs and of gradients, and all gradients as close as bfloat16 is."""
    model = new(Language)
    if way == "bfloat16":
        model = model.bfloat16()

    def inside(words: Tensor) -> Tensor:
        with _autocast():
            return model(words)

    def run(f: Function) -> tuple[torch.dtype, Gradients]:
        with _autocast() if way == "autocast" else contextlib.nullcontext():
            y = f(BATCH)
        F.cross_entropy(y.flatten(0, 1).float(), NEXT.flatten()).backward()
        return y.dtype, collected(model)

    function = inside if way == "autocast inside" else model
    dtype, expected = run(function)
    y_eager, eager = run(compiled(function))
    torch._dynamo.reset()
    y_aot, aot = run(compiled(function, inner="aot_eager"))
    assert dtype == y_eager == y_aot == torch.bfloat16
    assert near(expected, aot) and same(eager, aot)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("marked", [True, False])
def test_dynamic_shapes_train_with_one_compilation(marked: bool, inner: str) -> None:
    """Each batch size has the gradients of its own static graph. Linear layers alone, so that
    Inductor too has the same bits, without biases."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    options = {"minimum_gain": 0, "scheme": "w8a8-asymmetric", "inner": inner}
    dynamic = None if marked else True
    f = torch.compile(model, backend=qfx.backend, dynamic=dynamic, options=options)
    found = {}
    counters.clear()
    for rows in (6, 4, 9, 17):
        x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows)).requires_grad_()
        if marked:
            torch._dynamo.mark_dynamic(x, 0)
        f(x).square().sum().backward()
        found[x] = {"x": x.grad, **collected(model)}
    assert counters["stats"]["unique_graphs"] == 1
    for x, gradients in found.items():
        torch._dynamo.reset()
        assert same(of_x_too(compiled(model), model, x=x), gradients)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_the_int8_backward_depends_on_the_seed_alone(inner: str) -> None:
    """One torch.manual_seed, one result, checkpointed or not; the mean over seeds is the gradient
    that the float backward has of the same forward, z < 5 for each element."""
    model = new(Two)
    exact = of_x_too(compiled(model), model)
    torch._dynamo.reset()
    f = compiled(model, inner=inner, backward="int8")

    def seeded(seed: int, f: Function = f) -> Gradients:
        torch.manual_seed(seed)
        return of_x_too(f, model)

    runs = [seeded(s) for s in range(100)]
    assert same(runs[0], seeded(0))
    assert same(runs[0], seeded(0, lambda x: checkpoint(f, x, use_reentrant=False)))
    for name, e in exact.items():
        stack = torch.stack([r[name] for r in runs]).double()
        if name == "b.bias":
            assert stack.eq(e).all()
            continue
        assert not stack[0].equal(stack[1]), name
        bound = 5 * stack.std(0) / len(runs) ** 0.5 + 1e-6 * stack.abs().amax()
        assert ((stack.mean(0) - e).abs() <= bound).all(), name


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes_of_inductor(mode: str) -> None:
    """A layer large enough to be int8 without options; dx and dw have the bits of inner="eager"."""
    torch.manual_seed(0)
    model, x = nn.Linear(256, 256, bias=False), torch.randn(64, 256)
    eager = of_x_too(
        torch.compile(model, backend=qfx.backend, options={"inner": "eager"}), model, x=x
    )
    torch._dynamo.reset()
    f = torch.compile(model, backend=qfx.backend, mode=mode)
    assert same(eager, of_x_too(f, model, x=x))
    assert near(of_x_too(model, model, x=x), eager)
