"""Training: graphs where gradients flow to some tensors only, and losses with odd gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.lib.models import compiled
from tests.lib.training import Two, X, near, new, of_x_too, same


def _no_grad_region(m: Two, x: Tensor) -> Tensor:
    with torch.no_grad():
        size = m.a(x).abs().mean()
    return m.b(m.a(x)) * size


def _enabled_in_no_grad(m: Two, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = m.a(x)
        with torch.enable_grad():
            return m.b(h)


def _weight_viewed_without_gradients(m: Two, x: Tensor) -> Tensor:
    with torch.no_grad():
        w = m.b.weight.t()
    return m.a(x) @ w


def _hook_inside(m: Two, x: Tensor) -> Tensor:
    h = m.a(x)
    h.register_hook(lambda grad: 3 * grad)
    return m.b(h)


FLOWS: dict[str, Callable[[Two, Tensor], Tensor]] = {
    "no_grad region": _no_grad_region,
    "enable_grad in no_grad": _enabled_in_no_grad,
    "hook inside": _hook_inside,
    "x detached": lambda m, x: m(x.detach()),
    "h detached and not": lambda m, x: m.b(m.a(x).detach().reshape(2, 3, 8)).flatten(0, 1) + m.a(x),
    "bias detached": lambda m, x: F.linear(m.a(x), m.b.weight, m.b.bias.detach()),
    "one output of two": lambda m, x: (m.a(x), m.b(x))[0],
    "weight slice": lambda m, x: F.linear(m.a(x), m.b.weight[:4]),
    "weight detached": lambda m, x: F.linear(m.a(x), m.b.weight.detach()),
    "weight detached and not": lambda m, x: m.b(F.linear(x, m.b.weight.detach())),
    "weight viewed in no_grad": _weight_viewed_without_gradients,
    "whole": lambda m, x: m(x),
}


@pytest.mark.parametrize("flow", FLOWS)
def test_gradients_flow_where_they_do_in_float(flow: str) -> None:
    model = new(Two)

    def function(x: Tensor) -> Tensor:
        return FLOWS[flow](model, x)

    expected = of_x_too(function, model)
    eager = of_x_too(compiled(function, inner="eager"), model)
    assert near(expected, eager)
    torch._dynamo.reset()
    assert same(eager, of_x_too(compiled(function, inner="aot_eager"), model))


@pytest.mark.parametrize("frozen", [["a.weight"], ["a.weight", "b.weight"], ["a.bias", "b.bias"]])
def test_some_parameters_frozen(frozen: list[str]) -> None:
    model = new(Two)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    eager = of_x_too(compiled(model, inner="eager"), model)
    assert [n for n in eager if eager[n] is None] == frozen
    assert near(of_x_too(model, model), eager)
    torch._dynamo.reset()
    assert same(eager, of_x_too(compiled(model, inner="aot_eager"), model))


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": Tensor.sum,
    "strided": lambda y: y[::2, 1::3].square().sum(),
    "transposed": lambda y: (y.t() @ torch.arange(6.0)).square().sum(),
    "zero": lambda y: (0 * y).sum(),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_whose_gradient_is_not_contiguous(loss: str) -> None:
    model = new(Two)
    eager = of_x_too(compiled(model, inner="eager"), model, LOSSES[loss])
    torch._dynamo.reset()
    assert same(eager, of_x_too(compiled(model, inner="aot_eager"), model, LOSSES[loss]))
    if loss == "zero":
        assert all(d is not None and not d.any() for d in eager.values())
    else:
        assert near(of_x_too(model, model, LOSSES[loss]), eager)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_without_rows_gradients_are_zero(inner: str) -> None:
    model = new(Two)
    found = of_x_too(compiled(model, inner=inner), model, x=X[:0])
    assert all(d is not None and not d.any() for d in found.values())


def test_hooks_see_and_change_gradients() -> None:
    model, seen = new(Two), []
    f = compiled(model, inner="aot_eager")
    plain = of_x_too(f, model)
    model.a.weight.register_hook(lambda grad: 2 * grad)
    model.b.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    hooked = of_x_too(f, model)
    assert same(hooked, {**plain, "a.weight": 2 * plain["a.weight"]})
    assert len(seen) == 1 and seen[0].equal(plain["b.bias"])


def test_batched_gradients_are_those_one_by_one() -> None:
    """`is_grads_batched`, on which torch.autograd.functional.jacobian(vectorize=True) stands."""
    model, x = new(Two), X.clone().requires_grad_()
    y, leaves = compiled(model, inner="aot_eager", backward="int8")(x), [x, *model.parameters()]
    batch = torch.randn(3, *y.shape, generator=torch.Generator().manual_seed(0))
    batched = torch.autograd.grad(y, leaves, batch, is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(y, leaves, g, retain_graph=True) for g in batch]
    columns = zip(*single, strict=True)
    assert all(b.equal(torch.stack(s)) for b, s in zip(batched, columns, strict=True))


@pytest.mark.parametrize("trains", [True, False])
def test_a_weight_changed_before_backward_is_an_error(trains: bool) -> None:
    """As in float, whether the weight itself was saved or its packed form."""
    model, x = new(Two), X.clone().requires_grad_()
    model.b.weight.requires_grad_(trains)
    f = compiled(model, inner="aot_eager")
    y = f(x)
    with torch.no_grad():
        model.b.weight.mul_(2)
        f(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
