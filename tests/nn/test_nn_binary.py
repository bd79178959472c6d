"""BinaryLinear: exact sums, straight-through gradients, and a packed weight that is never stale."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import qfx
from qfx.nn import BinaryLinear
from qfx.nn.binary import CLIP, binary_linear
from tests.lib.strategies import DTYPES, POSITIVE, SEEDS, SIZES

HALF_ULP = 2.0**-24
AXES = st.sampled_from([qfx.PER_ROW, qfx.PER_TENSOR])
X = torch.randn(32, 24, generator=torch.Generator().manual_seed(0))


def signs(v: Tensor) -> Tensor:
    return torch.where(v >= 0, 1.0, -1.0).double()


class _Sign(torch.autograd.Function):
    """scale * sign(v); its gradient to v is 1 for |v| <= limit, that to the scale is sign(v)."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, scale: Tensor, limit: Any) -> Tensor:
        ctx.save_for_backward(signs(v), v.abs() <= limit)
        ctx.shape = scale.shape
        return scale * signs(v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        sign, inside = ctx.saved_tensors
        return grad * inside, (grad * sign).sum_to_size(ctx.shape), None


def mean_size(w: Tensor, axes: tuple[int, ...]) -> Tensor:
    size = w.double().abs()
    return size.mean(1) if axes == qfx.PER_ROW else size.mean().expand(w.shape[0])


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor | None, Tensor, tuple[int, ...]]:
    m, k, n = draw(SIZES), draw(POSITIVE), draw(POSITIVE)
    g = torch.Generator().manual_seed(draw(SEEDS))
    x = torch.randn(*draw(st.sampled_from([(m,), (1, m), (m, 2)])), k, generator=g)
    x = torch.where(torch.rand(x.shape, generator=g) < 0.1, torch.zeros(()), x)
    w = torch.randn(n, k, generator=g)
    bias = torch.randn(n, generator=g) if draw(st.booleans()) else None
    return x, w, bias, torch.rand(1, generator=g) + 0.2, draw(AXES)


@given(problems(), DTYPES)
def test_output_is_the_exact_sum_of_signs_scaled(p: Any, dtype: torch.dtype) -> None:
    """(H3): one rounding for each of the mean, two products and the sum, then that of the type."""
    x, w, bias, scale, axes = p
    x = x.to(dtype)
    y = binary_linear(x, w, bias, scale, axes)
    sums = signs(x) @ signs(w).t()
    exact = sums * (scale.double() * mean_size(w, axes))
    whole = exact + (0 if bias is None else bias)
    k = w.numel() if axes == qfx.PER_TENSOR else w.shape[1]
    error = ((k + 8) * exact.abs() + 2 * whole.abs()) * HALF_ULP
    unit = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    assert y.dtype == dtype and y.shape == (*x.shape[:-1], w.shape[0])
    assert ((y.double() - whole).abs() <= error + unit * (whole.abs() + error) + 2.0**-24).all()


@given(problems(), SEEDS, st.booleans())
def test_gradients_equal_the_oracle(p: Any, seed: int, turned: bool) -> None:
    """(H4)-(H6) by autograd in float64, within the roundings of one float32 matmul and one sum."""
    x, w, bias, scale, axes = p
    leaves = [t for t in (x, w, scale, bias) if t is not None]
    got_in = [t.clone().requires_grad_() for t in leaves]
    y = binary_linear(
        got_in[0], got_in[1], got_in[3] if bias is not None else None, got_in[2], axes
    )
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed))
    grad = grad.transpose(0, -1).contiguous().transpose(0, -1) if turned else grad
    before = grad.clone()
    got = torch.autograd.grad(y, got_in, grad)
    assert torch.equal(grad, before)

    exact = [t.double().requires_grad_() for t in leaves]
    w_scale = mean_size(w, axes)
    w_hat = _Sign.apply(exact[1], w_scale[:, None], CLIP)
    wanted = _Sign.apply(exact[0], exact[2], scale) @ w_hat.t()
    wanted = wanted + (0 if bias is None else exact[3])
    expected = torch.autograd.grad(wanted, exact, grad.double())

    m, n, k = y[..., 0].numel(), w.shape[0], w.shape[1]
    flat = grad.reshape(m, n).double().abs()
    dx, dw = (flat * w_scale).sum(1, keepdim=True).expand(m, k), flat.sum(0)[:, None] * scale
    sizes = [dx.reshape(x.shape), dw.expand(n, k), dx.sum().reshape(1), flat.sum(0)]
    shared = k if axes == qfx.PER_ROW else n * k  # terms of the mean behind w_scale
    terms = [n + shared, m, n + shared + m * k, m]
    for g, e, size, count in zip(got, expected, sizes, terms, strict=False):
        assert g.dtype == torch.float32 and g.shape == e.shape
        assert ((g.double() - e).abs() <= (count + 8) * HALF_ULP * size * 1.01).all()


def test_clipped_elements_and_zeros_count_for_the_scale() -> None:
    """(H5): d(s sign x)/ds = sign x everywhere, +1 for both zeros as in the forward."""
    x = torch.tensor([[3.0, -3.0, 0.0, -0.0, 0.5]], requires_grad=True)
    w, scale = torch.full((1, 5), 0.25), torch.ones(1, requires_grad=True)
    binary_linear(x, w, None, scale).sum().backward()
    assert x.grad is not None and scale.grad is not None
    assert x.grad.tolist() == [[0.0, 0.0, 0.25, 0.25, 0.25]]
    assert scale.grad.item() == 0.25 * (1 - 1 + 1 + 1 + 1)


def test_weights_beyond_the_clip_get_no_gradient() -> None:
    w = torch.tensor([[1.5, -1.5, 1.0, -0.2]], requires_grad=True)
    binary_linear(torch.ones(1, 4), w, None, torch.full((1,), 0.5)).sum().backward()
    assert w.grad is not None and w.grad.tolist() == [[0.0, 0.0, 0.5, 0.5]]


def _model(shift: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 8, bias=False))
    return qfx.prepare_binary(model, X, shift=shift)


def test_prepared_model_keeps_its_parameters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 8, bias=False))
    weights, old = list(model.parameters()), model(X)
    assert qfx.prepare_binary(model, X, config=qfx.Config(skip=("2",))) is model
    assert isinstance(model[0], BinaryLinear) and type(model[2]) is nn.Linear
    kept = {id(p) for p in model.parameters()}
    assert all(id(w) in kept for w in weights) and len(kept) == len(weights) + 1
    assert torch.nn.functional.cosine_similarity(old.flatten(), model(X).flatten(), 0) > 0.5


@pytest.mark.parametrize("backend", ["aot_eager", "qfx", "inductor"])
def test_compiled_equals_eager(backend: str) -> None:
    """Outputs to the bit where the scales are computed by the same code, gradients within
    reassociation."""
    options: Any = {"inner": "aot_eager"} if backend == "qfx" else None
    model = _model(shift=True)
    found = []
    for f in (model, torch.compile(model, backend=backend, fullgraph=True, options=options)):
        model.zero_grad()
        y = f(X)
        y.square().sum().backward()
        found.append((y, [p.grad for p in model.parameters()]))
    (y, grads), (y2, grads2) = found
    assert torch.allclose(y, y2, rtol=1e-6, atol=0) if backend == "inductor" else torch.equal(y, y2)
    for g, g2 in zip(grads, grads2, strict=True):
        assert g is not None and g2 is not None
        assert torch.allclose(g, g2, rtol=1e-4, atol=1e-5 * float(g.abs().amax()))


def test_training_lowers_the_loss() -> None:
    torch.manual_seed(1)
    target, module = (
        nn.Linear(64, 32)(torch.randn(256, 64)).detach(),
        BinaryLinear(64, 32, shift=True),
    )
    x = torch.randn(256, 64)
    module.observe(x)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (module(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]
    assert all(p.isfinite().all() for p in module.parameters())


def test_state_dict_round_trip() -> None:
    first, second = (
        _model(shift=True),
        qfx.prepare_binary(
            nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 8, bias=False)),
            2 * X,
            shift=True,
        ),
    )
    assert not torch.equal(first(X), second(X))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(X), second(X)) and torch.equal(copy.deepcopy(first)(X), first(X))
    assert "weight scale per row, shift=True" in repr(first)


ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "no inputs": (
        lambda: qfx.prepare_binary(nn.Sequential(nn.Linear(4, 4))),
        ValueError,
        "prepare_binary: the scales of activations are fitted to data: give example inputs",
    ),
    "axes": (lambda: BinaryLinear(4, 4, axes=(0,)), ValueError, r"axes=\(0,\) is neither"),
    "second order": (
        lambda: _second_order(),
        NotImplementedError,
        "binary_linear has no second derivative",
    ),
}


def _second_order() -> None:
    x = X.clone().requires_grad_()
    y = binary_linear(x, torch.randn(8, 24, requires_grad=True), None, torch.ones(1))
    (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    g.sum().backward()


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    call, kind, phrase = ERRORS[name]
    with pytest.raises(kind, match=phrase):
        call()
