"""qfx.nn: learned steps, prepare_qat, and the functional linear under function transforms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qfx
from qfx.nn import LSQLinear
from qfx.nn import functional as QF
from qfx.ops.single_tensors import sqnr
from tests.lib.pairs import every

TENSOR4 = qfx.Scheme(x=qfx.QSpec(axes=qfx.PER_TENSOR), w=qfx.QSpec(bits=4, axes=qfx.PER_TENSOR))
ROW4 = qfx.Scheme(w=qfx.QSpec(bits=4))
SCHEMES = {str(s): s for s in (TENSOR4, ROW4, qfx.Scheme())}
X = torch.randn(32, 24, generator=torch.Generator().manual_seed(0))


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 8, bias=False))


@pytest.mark.parametrize("name", SCHEMES)
def test_prepared_model_is_close_to_float_and_keeps_its_parameters(name: str) -> None:
    model = _model()
    expected, weights = model(X), list(model.parameters())
    prepared = qfx.prepare_qat(model, X, config=qfx.Config(scheme=SCHEMES[name]))
    assert prepared is model and isinstance(model[0], LSQLinear)
    kept = {id(p) for p in model.parameters()}
    assert all(id(w) in kept for w in weights) and len(kept) > len(weights)
    assert sqnr(expected, model(X)) > (30 if name == str(qfx.Scheme()) else 10)


@pytest.mark.parametrize("name, backend", every(SCHEMES, ["aot_eager", "qfx"]))
def test_compiled_equals_eager(name: str, backend: str) -> None:
    """Outputs to the bit, gradients of every parameter within float reassociation."""
    model = qfx.prepare_qat(_model(), X, config=qfx.Config(scheme=SCHEMES[name]), shift=True)
    options: Any = {"inner": "aot_eager"} if backend == "qfx" else None
    found = []
    for f in (model, torch.compile(model, backend=backend, fullgraph=True, options=options)):
        model.zero_grad()
        y = f(X)
        y.square().sum().backward()
        found.append((y, [p.grad for p in model.parameters()]))
    (y, grads), (y2, grads2) = found
    assert torch.equal(y, y2) and all(g is not None for g in grads)
    for g, g2 in zip(grads, grads2, strict=True):
        assert torch.allclose(g, g2, rtol=1e-4, atol=1e-5 * float(g.abs().amax()))


def test_learned_steps_lower_the_loss_and_stay_positive() -> None:
    """Training only the steps of a 3-bit layer brings it closer to float, at any learning rate."""
    torch.manual_seed(1)
    layer = nn.Linear(64, 32, bias=False)
    x = torch.randn(256, 64)
    target = layer(x)
    scheme = qfx.Scheme(x=qfx.QSpec(bits=4, axes=qfx.PER_TENSOR), w=qfx.QSpec(bits=3))
    module = LSQLinear.from_float(layer, scheme)
    module.observe(3 * x)  # a bad start
    steps = [p for name, p in module.named_parameters() if name.endswith("log_step")]
    optimizer = torch.optim.Adam(steps, lr=0.1)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = F.mse_loss(module(x), target.detach())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert min(losses[-5:]) < 0.7 * losses[0]
    assert all((p.exp() > 0).all() for p in steps)


@pytest.mark.parametrize("name", SCHEMES)
def test_the_gradient_of_a_step_is_scaled_by_what_shares_it(name: str) -> None:
    """1 / sqrt(elements * qmax) times that of the step itself, and the logarithm's derivative."""
    scheme = SCHEMES[name]
    module = LSQLinear.from_float(nn.Linear(24, 8), scheme)
    module.observe(X)
    module(X).square().sum().backward()
    learned = [(module.w_log_step, module.w_log_step.exp().detach().requires_grad_())]
    x_step = None
    if module.x_log_step is not None:
        x_step = module.x_log_step.exp().detach().requires_grad_()
        learned.append((module.x_log_step, x_step))
    (_, w_step), *_ = learned
    QF.lsq_linear(X, module.weight, module.bias, x_step, w_step, scheme).square().sum().backward()
    counts = [24 * 8 if scheme.w.axes == qfx.PER_TENSOR else 24, 24]
    for (log_step, step), bits, count in zip(learned, (scheme.w.bits, 8), counts, strict=False):
        expected = step.grad * step.detach() / math.sqrt(count * (2 ** (bits - 1) - 1))
        assert torch.allclose(log_step.grad, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("axes", [qfx.PER_ROW, qfx.PER_TENSOR])
def test_the_best_step_is_no_worse_than_any_fraction_of_the_largest(axes: tuple[int, ...]) -> None:
    v = torch.cat([X[:3], torch.tensor([[1.0, -1.0] * 12])])  # the last is exact with the largest
    for bits in (2, 4, 8):
        qmax, rows = 2 ** (bits - 1) - 1, v if axes == qfx.PER_ROW else v.reshape(1, -1)

        def error(step: Tensor, rows: Tensor = rows, qmax: int = qmax) -> Tensor:
            return ((rows / step).round().clamp(-qmax, qmax) * step - rows).square().sum(1)

        found = error(QF.best_step(v, bits, True, axes))
        largest = rows.abs().amax(1, keepdim=True) / qmax
        assert all((found <= error(largest * (i / 64))).all() for i in range(1, 65))


def test_shift_gets_the_column_sum_of_dx() -> None:
    module = LSQLinear(24, 8, scheme=qfx.Scheme(), shift=True)
    x = X.clone().requires_grad_()
    module(x).square().sum().backward()
    assert module.shift is not None and module.shift.grad is not None
    assert torch.allclose(module.shift.grad, x.grad.sum(0), rtol=1e-5, atol=1e-5)


def test_state_dict_round_trip() -> None:
    first = qfx.prepare_qat(_model(), X, config=qfx.Config(scheme=TENSOR4))
    second = qfx.prepare_qat(_model(), 2 * X, config=qfx.Config(scheme=TENSOR4))
    assert not torch.equal(first(X), second(X))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(X), second(X))
    assert "scheme=xs8t_ws4t" in repr(first)


def test_lsq_is_named_by_explain() -> None:
    model = qfx.prepare_qat(_model(), config=qfx.Config(scheme=ROW4))
    reasons = [row.reason for row in qfx.explain(model, X).rows]
    assert reasons == ["an int8 module, qfx.nn.LSQLinear"] * 2


ERRORS: dict[str, tuple[Any, str]] = {
    "no inputs": (
        lambda: qfx.prepare_qat(_model(), config=qfx.Config(scheme=TENSOR4)),
        "xs8t_ws4t learns the step of activations, which is fitted to data first",
    ),
    "no linear": (lambda: qfx.prepare_qat(nn.Sequential(nn.ReLU())), "has no nn.Linear inside"),
    "pattern": (
        lambda: qfx.prepare_qat(_model(), config=qfx.Config(skip=("7",))),
        "'7' matches nothing; there is: 0, 2",
    ),
    "not run": (
        lambda: qfx.prepare_qat(_Unused(), X, config=qfx.Config(scheme=TENSOR4)),
        "b did not run on the example inputs",
    ),
}


class _Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(24, 8), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    call, phrase = ERRORS[name]
    with pytest.raises(ValueError, match=phrase):
        call()


# --- the functional linear ---


def _loss(w: Tensor, x: Tensor, b: Tensor) -> Tensor:
    return QF.linear(x, w, b).square().sum()


@pytest.mark.parametrize("name", SCHEMES)
def test_a_functional_linear_is_that_of_its_codes(name: str) -> None:
    """y = x^ w^.T + b, dx = G w^ and dw = G^T x^, of what the codes stand for. (T1)"""
    scheme, w, b = SCHEMES[name], torch.randn(8, 24), torch.randn(8)
    x, w = X.clone().requires_grad_(), w.requires_grad_()
    y = QF.linear(x, w, b, scheme)
    g = torch.randn(y.shape)
    y.backward(g)
    x_q, w_q = (qfx.quantize(t.detach(), spec) for t, spec in ((x, scheme.x), (w, scheme.w)))
    x_hat, w_hat = (qfx.dequantize(q).double() for q in (x_q, w_q))
    pairs = ((y.detach() - b, x_hat, w_hat.t()), (x.grad, g.double(), w_hat))
    for got, left, right in (*pairs, (w.grad, g.double().t(), x_hat)):
        bound = (left.shape[1] + 8) * 2.0**-24 * (left.abs() @ right.abs() + b.abs().max())
        assert ((got.double() - left @ right).abs() <= bound).all()


def test_function_transforms_give_the_gradients_of_autograd() -> None:
    w, b = torch.randn(8, 24), torch.randn(8)
    got = torch.func.grad(_loss, argnums=(0, 1, 2))(w, X, b)
    leaves = [t.clone().requires_grad_() for t in (w, X, b)]
    expected = torch.autograd.grad(_loss(*leaves), leaves)
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
    value, pull = torch.func.vjp(lambda w: _loss(w, X, b), w)
    assert torch.equal(pull(torch.ones_like(value))[0], expected[0])


def test_functional_call_with_parameters_as_arguments() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 24))

        def forward(self, x: Tensor) -> Tensor:
            return QF.linear(x, self.w)

    net = Net()
    parameters = dict(net.named_parameters())
    run = lambda p: torch.func.functional_call(net, p, (X,)).square().sum()  # noqa: E731
    (gradient,) = torch.func.grad(run)(parameters).values()
    assert torch.equal(gradient, torch.autograd.grad(run(parameters), net.w)[0])


@pytest.mark.parametrize("transform", ["second order", "hessian", "jvp"])
def test_other_transforms_are_errors(transform: str) -> None:
    w, b = torch.randn(8, 24), torch.randn(8)
    with pytest.raises((NotImplementedError, RuntimeError)):
        if transform == "second order":
            x = X.clone().requires_grad_()
            (g,) = torch.autograd.grad(_loss(w, x, b), x, create_graph=True)
            g.sum().backward()
        elif transform == "hessian":
            torch.func.grad(lambda w: torch.func.grad(_loss)(w, X, b).sum())(w)
        else:
            torch.func.jvp(lambda x: QF.linear(x, w), (X,), (X,))
