"""Training: what has no int8 form is an error, or as in float; never zeros."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from qfx.ops.single_tensors import sqnr
from tests.lib.models import compiled
from tests.lib.pairs import pairs
from tests.lib.training import Function, Two, X, new


def _double_backward(f: Function) -> Tensor:
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(g.square().sum(), x)[0]


def _dual(f: Function) -> Tensor | None:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(X, torch.ones_like(X)))).tangent


ERRORS: dict[str, tuple[Function, str]] = {
    "double backward": (_double_backward, "no second derivative|not currently support double"),
    "hessian": (
        lambda f: torch.autograd.functional.hessian(lambda x: f(x).square().sum(), X),
        "no second derivative|not currently support double",
    ),
    "dual numbers": (_dual, "carries a forward-mode tangent|implement the jvp function"),
}


@pytest.mark.parametrize("name, warm, inner", pairs(ERRORS, [True, False], ["eager", "aot_eager"]))
def test_second_orders_and_tangents_are_errors(name: str, warm: bool, inner: str) -> None:
    """Or right: Dynamo of PyTorch 2.15 leaves a function of dual numbers in float."""
    function, phrase = ERRORS[name]
    model = new(Two)
    f = compiled(model, inner=inner)
    if warm:
        f(X)
    try:
        got = function(f)
    except (NotImplementedError, RuntimeError) as error:
        assert re.search(phrase, str(error)), error
    else:
        torch.testing.assert_close(got, function(model), rtol=0, atol=0)


TRANSFORMS: dict[str, Function] = {
    "jvp": lambda f: torch.func.jvp(f, (X,), (torch.ones_like(X),))[1],
    "vmap": lambda f: torch.func.vmap(f)(torch.stack([X, 2 * X])),
    "grad": lambda f: torch.func.grad(lambda x: f(x).square().sum())(X),
    "vjp": lambda f: torch.func.vjp(f, X)[1](torch.ones_like(X))[0],
    "jacrev": lambda f: torch.func.jacrev(f)(X[:2]),
    "jacfwd": lambda f: torch.func.jacfwd(f)(X[:2]),
    "jacobian": lambda f: torch.autograd.functional.jacobian(f, X[:2], vectorize=True),
}


@pytest.mark.parametrize(
    "name, warm, inner", pairs(TRANSFORMS, [True, False], ["eager", "aot_eager"])
)
def test_transforms_of_a_compiled_function_are_right(name: str, warm: bool, inner: str) -> None:
    """Dynamo leaves what runs inside a transform to eager PyTorch, so it is float or near float."""
    model = new(Two)
    f = compiled(model, inner=inner)
    if warm:
        f(X), f(X.clone().requires_grad_())
    expected, found = TRANSFORMS[name](model), TRANSFORMS[name](f)
    assert expected.any() and (found.equal(expected) or sqnr(expected, found) > 25)
