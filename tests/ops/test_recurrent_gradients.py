"""Gradients of lstm and gru: those of a straight-through oracle in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qfx.ops.code import Code
from qfx.ops.recurrent import steps_of
from qfx.ops.weight_values import weight_values
from tests.ops.test_op_recurrent import F32, Layer, layer

ops = torch.ops.qfx


def oracle(of: Layer, leaves: list[Tensor], y: Tensor) -> list[Tensor]:
    """Computes the layer in float64 on `leaves`: x, the bias and the state. Quantizing h counts as
    the identity, and each h has the values of `y`."""
    x, bias, h, *c = leaves
    w = weight_values(of.weight, of.layout, h.shape[1], F32)
    rotation = Code(*of.code).rotation
    w = ops.rotate(w, None, rotation, True).double() if rotation else w.double()
    found = torch.zeros(y.shape, dtype=torch.float64)
    for rows, size in steps_of(of.x, of.sizes, of.reverse):
        state = h[:size]
        how = (of.weight, of.layout, of.bias, of.code, "none", F32)
        exact = ops.linear_dynamic.default(state.detach().float(), *how).double()
        r = state @ w.t() + bias
        r = r + (exact - r).detach()
        x_t = x.reshape(-1, x.shape[-1])[rows]
        if c:
            i, f, g, o = (x_t + r).chunk(4, 1)
            new = f.sigmoid() * c[0][:size] + i.sigmoid() * g.tanh()
            c = [torch.cat([new, c[0][size:]])]
            new = o.sigmoid() * new.tanh()
        else:
            (x_r, x_z, x_n), (h_r, h_z, h_n) = x_t.chunk(3, 1), r.chunk(3, 1)
            n = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
            new = n + (x_z + h_z).sigmoid() * (state - n)
        new = new + (y.reshape(-1, y.shape[-1])[rows].double() - new).detach()
        h = torch.cat([new, h[size:]])
        flat = found.flatten(0, -2)
        found = torch.cat([flat[: rows.start], new, flat[rows.stop :]])
    return [found.reshape(y.shape), h, *c]


CASES = {
    "one step": {"steps": 1},
    "steps": {},
    "reverse": {"reverse": True},
    "rotated": {"code": [*Code(8, 0, rotation=64)]},
    "groups": {"form": "groups"},
    "4 bits": {"form": "4 bits"},
    "packed": {"sizes": torch.tensor([3, 3, 2, 1])},
    "packed, reverse": {"sizes": torch.tensor([3, 3, 2, 1]), "reverse": True},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("gates", [3, 4])
def test_gradients_are_those_of_the_float_formula(gates: int, case: str) -> None:
    """Float32 rounds; steps amplify that by no more than the weights do, which are small here."""
    of = layer(**{"gates": gates, "size": 64, "steps": 4, "batch": 3, **CASES[case]})
    if of.sizes is not None:
        of = of._replace(x=of.x.flatten(0, 1)[: int(of.sizes.sum())])
    leaves = [t.clone().requires_grad_() for t in (of.x, of.bias, *of.state) if t is not None]
    x, bias, *state = leaves
    results = of._replace(x=x, bias=bias, state=tuple(state)).run()
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    expected = oracle(of, doubles, results[0].detach())
    grads = [torch.randn_like(t) for t in results]
    got = torch.autograd.grad(results, leaves, grads)
    right = torch.autograd.grad(expected, doubles, [g.double() for g in grads])
    for a, b in zip(got, right, strict=True):
        assert (a - b).abs().max() <= 2.0**-15 * b.abs().max()


@pytest.mark.parametrize("gates", [3, 4])
def test_only_what_is_wanted_has_a_gradient_in_its_dtype(gates: int) -> None:
    of = layer(gates, 32, 2, 2, dtype=torch.bfloat16)
    h = of.state[0].clone().requires_grad_()
    y, *last = of._replace(state=(h, *of.state[1:])).run()
    last[0].sum().backward()
    assert h.grad is not None and h.grad.dtype == torch.bfloat16 and h.grad.abs().sum() > 0
    assert y.requires_grad and of.x.grad is None


@pytest.mark.parametrize("gates", [3, 4])
def test_second_derivatives_are_refused(gates: int) -> None:
    of = layer(gates, 32, 2, 2)
    x = of.x.clone().requires_grad_()
    y, *_ = of._replace(x=x).run()
    with pytest.raises(NotImplementedError, match="has no second derivative"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
