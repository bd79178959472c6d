"""Training through the compiler: every way to run one int8 step gives the same gradients, bit for
bit, and near those of float."""

from __future__ import annotations

import threading
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

import qfx
from tests.conftest import UseCosts
from tests.lib.costs import FIXED, exchanged, fixed_tables
from tests.lib.models import compiled
from tests.lib.pairs import every
from tests.lib.training import (
    BATCH,
    Function,
    Gradients,
    Language,
    Two,
    X,
    collected,
    loss_of,
    near,
    new,
    of_x_too,
    same,
    step,
)


def _plain(model: Language, inner: str) -> Gradients:
    return step(compiled(model, inner=inner), model)


def _checkpoint_inside(model: Language, inner: str) -> Gradients:
    return step(
        compiled(lambda words: checkpoint(model, words, use_reentrant=False), inner=inner), model
    )


def _checkpoint_around(model: Language, inner: str) -> Gradients:
    f = compiled(model, inner=inner)
    return step(lambda words: checkpoint(f, words, use_reentrant=False), model)


def _compiled_autograd(model: Language, inner: str) -> Gradients:
    f = compiled(model, inner=inner)
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        return step(f, model)


def _whole_step_compiled(model: Language, inner: str) -> Gradients:
    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled(lambda: loss_of(model).backward(), inner=inner)()
    return collected(model)


def _saved_elsewhere(model: Language, inner: str) -> Gradients:
    f = compiled(model, inner=inner)
    with torch.autograd.graph.save_on_cpu():
        return step(f, model)


def _second_backward(model: Language, inner: str) -> Gradients:
    loss = loss_of(compiled(model, inner=inner))
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    return collected(model)


def _after_inference(model: Language, inner: str) -> Gradients:
    f = compiled(model, inner=inner)
    with torch.inference_mode():
        f(BATCH)
    return step(f, model)


def _other_thread(model: Language, inner: str) -> Gradients:
    f, found = compiled(model, inner=inner), []
    thread = threading.Thread(target=lambda: found.append(step(f, model)))
    thread.start()
    thread.join()
    return found[0]


WAYS = [
    _plain, _checkpoint_inside, _checkpoint_around, _compiled_autograd, _whole_step_compiled,
    _saved_elsewhere, _second_backward, _after_inference, _other_thread,
]  # fmt: skip


@cache
def _reference() -> Gradients:
    """One step as the rewritten graph and eager autograd have it, near float's."""
    model = new(Language)
    found = _plain(model, "eager")
    torch._dynamo.reset()
    assert near(step(model, model), found)
    return found


@pytest.mark.parametrize("way, inner", every(WAYS, ["eager", "aot_eager"]))
def test_every_way_gives_the_same_bits(way: Function, inner: str) -> None:
    assert same(_reference(), way(new(Language), inner))


def test_inductor_gives_the_same_weight_gradients() -> None:
    """All matmuls and operators are called as they are, so dw and dx have the same bits; only the
    sums over tokens behind db are reassociated: tokens + 8 roundings of the sum of |g|."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    # dL/dy is all ones; dL/dh, h between the layers, is what reaches the first bias
    eager = of_x_too(compiled(model, inner="eager"), model, Tensor.sum)
    torch._dynamo.reset()
    found = of_x_too(compiled(model, inner="inductor"), model, Tensor.sum)
    w_hat = torch.ops.qfx.fake_quantize(model[1].weight, [1], 8, True, torch.float32)
    sizes = {"0.bias": (torch.ones_like(X) @ w_hat).abs().sum(0), "1.bias": torch.tensor(len(X))}
    for name, e in eager.items():
        bound = (len(X) + 8) * 2.0**-24 * sizes.get(name, torch.tensor(0))
        assert ((found[name] - e).abs() <= bound).all(), name


def test_accumulated_gradients_are_the_sum() -> None:
    model = new(Language)
    f = compiled(model, inner="aot_eager")
    halves = slice(0, 2), slice(2, 4)
    parts = []
    for half in halves:
        loss_of(f, half, "sum").backward()
        parts.append(collected(model))
    for half in halves:
        loss_of(f, half, "sum").backward()
    accumulated = collected(model)
    assert same(accumulated, {n: parts[0][n] + parts[1][n] for n in accumulated})


def test_the_compiled_backward_keeps_its_products_float(use_costs: UseCosts) -> None:
    """Also where int8 would gain: `backward` says how gradients are computed, nothing else does."""
    use_costs(fixed_tables(products=exchanged(FIXED["products"])))
    assert same(_reference(), _whole_step_compiled(new(Language), "eager"))


@pytest.mark.parametrize(
    "capture",
    [
        pytest.param(lambda model: qfx.trace(model, X), id="trace with shapes"),
        pytest.param(qfx.trace, id="trace"),
        pytest.param(lambda model: torch.export.export(model, (X,)).module(), id="export"),
    ],
)
def test_a_graph_rewritten_for_training_has_the_same_bits(capture: Function) -> None:
    model = new(Two)
    reference = of_x_too(compiled(model), model)
    config = qfx.Config(minimum_gain=0, scheme="w8a8-asymmetric")
    gm, plan = qfx.rewrite(capture(model), config, training=True)
    assert plan.quantized == 2
    assert same(reference, of_x_too(gm, gm))
    with torch.no_grad():  # a step: nothing that was packed before may serve now
        for parameter in {*model.parameters(), *gm.parameters()}:
            parameter.mul_(1.5)
    assert same(of_x_too(compiled(model), model), of_x_too(gm, gm))
