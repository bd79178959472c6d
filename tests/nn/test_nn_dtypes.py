"""Dtypes of the modules: under autocast those of nn.Linear, and casts that leave steps float32."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qfx
from qfx.nn import functional as QF
from qfx.ops.code import Code
from qfx.ops.layout import Layout
from tests.lib.pairs import every

K, N = 64, 24
X = torch.randn(5, 3, K, generator=torch.Generator().manual_seed(0))
TENSOR, ROW = qfx.QSpec(axes=qfx.PER_TENSOR), qfx.QSpec()
HALVES = (torch.bfloat16, torch.float16)
STATIC = qfx.SiteRecipe(
    "0", 0, N, K, qfx.Scheme(x=qfx.QSpec(axes=qfx.PER_TENSOR, static=True)), scale=0.03
)


class Functional(nn.Module):
    """qfx.nn.functional.linear as a module."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return QF.linear(x, self.weight, self.bias)


def _observed(module: Any) -> nn.Module:
    module.observe(X)
    return module


MODULES: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "w8a8": qfx.nn.Linear.from_float,
    "rotated": lambda m: qfx.nn.Linear.from_float(m, qfx.Config().chosen),
    "weights alone": lambda m: qfx.nn.Linear.from_float(m, qfx.Scheme(x=None)),
    "groups": lambda m: qfx.nn.Linear.from_float(m, qfx.Scheme(w=qfx.QSpec(bits=4, group=64))),
    "static": lambda m: qfx.nn.Linear.from_float(m, STATIC),
    "functional": Functional,
    "lsq": qfx.nn.LSQLinear.from_float,
    "lsq, all steps learned": lambda m: _observed(
        qfx.nn.LSQLinear.from_float(m, qfx.Scheme(x=TENSOR, w=TENSOR), shift=True)
    ),
    "lsq, int8 backward": lambda m: qfx.nn.LSQLinear.from_float(m, qfx.Scheme(backward="int8")),
    "binary": lambda m: _observed(qfx.nn.BinaryLinear.from_float(m, shift=True)),
}
WITH_STEPS = [name for name in MODULES if name.startswith(("lsq", "binary"))]


def linear(dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(K, N).to(dtype)


def autocast(dtype: torch.dtype, on: bool = True) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype, enabled=on)


def trained(f: Any, module: nn.Module, x: Tensor, to: torch.dtype, backward_inside: bool) -> Any:
    """The output under autocast, and the gradients of x, weight and bias."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(0)
    with autocast(to):
        y = f(x)
        with autocast(to, on=backward_inside):
            y.float().square().sum().backward()
    return y, x.grad, {n: p.grad for n, p in module.named_parameters() if p.requires_grad}


CASTS = list(product([torch.float32, *HALVES], HALVES, [False, True]))


@pytest.mark.parametrize("name, cast", every(MODULES, CASTS))
def test_types_under_autocast_are_those_of_a_float_linear(
    name: str, cast: tuple[torch.dtype, torch.dtype, bool]
) -> None:
    given, to, backward_inside = cast
    x, reference, module = X.to(given), linear(), MODULES[name](linear())
    y, dx, gradients = trained(reference, reference, x, to, backward_inside)
    got, got_dx, got_gradients = trained(module, module, x, to, backward_inside)
    assert (got.dtype, got_dx.dtype) == (y.dtype, dx.dtype) == (to, given)
    for n, gradient in got_gradients.items():
        assert gradient.dtype == (gradients[n].dtype if n in gradients else torch.float32), n
        assert gradient.isfinite().all()


@pytest.mark.parametrize("name, to", every(MODULES, HALVES))
def test_autocast_rounds_the_float32_output(name: str, to: torch.dtype) -> None:
    """Nothing else changes: x is quantized as it is given."""
    module = MODULES[name](linear())
    with autocast(to):
        y = module(X)
    assert torch.equal(y, module(X).to(to))


@pytest.mark.parametrize("name", MODULES)
def test_compiled_follows_autocast(name: str) -> None:
    """One compiled function, called inside and outside."""
    module, options = MODULES[name](linear()), {"inner": "aot_eager"}
    f = torch.compile(module, backend="qfx", fullgraph=True, options=options)
    y, dx, gradients = trained(module, module, X, torch.bfloat16, False)
    got, got_dx, got_gradients = trained(f, module, X, torch.bfloat16, False)
    assert torch.equal(got, y) and got_dx.dtype == dx.dtype
    assert [g.dtype for g in got_gradients.values()] == [g.dtype for g in gradients.values()]
    assert torch.equal(f(X), module(X)) and f(X).dtype == torch.float32


def test_inductor_follows_autocast() -> None:
    module = MODULES["lsq, all steps learned"](linear())
    f = torch.compile(module, fullgraph=True)
    with autocast(torch.bfloat16):
        assert torch.equal(f(X), module(X)) and f(X).dtype == torch.bfloat16


def test_operators_return_the_type_that_they_are_told() -> None:
    """Autocast knows nothing of them."""
    module = MODULES["w8a8"](linear())
    how: Any = list(Layout(module.out_features)), module.bias, list(Code()), "none", torch.float32
    with autocast(torch.bfloat16):
        y = torch.ops.qfx.linear_dynamic(X, module.packed, *how)
    assert y.dtype == torch.float32 and torch.equal(y, module(X))


# --- casts ---


def steps(module: nn.Module) -> dict[str, Tensor]:
    return {n: p for n, p in module.named_parameters() if "log" in n}


def _loaded(module: nn.Module, name: str, assign: bool) -> nn.Module:
    """A module whose state is that of `module`, from a file in which all floats have its type."""
    file, dtype = io.BytesIO(), module.weight.dtype
    state = module.state_dict()
    torch.save({n: t.to(dtype) if t.is_floating_point() else t for n, t in state.items()}, file)  # type: ignore[call-overload]
    file.seek(0)
    made = MODULES[name](linear())
    made.load_state_dict(torch.load(file, weights_only=True), assign=assign)
    return made.to(module.weight.dtype)  # type: ignore[arg-type]


WAYS: dict[str, Callable[[nn.Module, str], nn.Module]] = {
    "itself": lambda m, name: m,
    "deepcopy": lambda m, name: copy.deepcopy(m),
    "pickle": lambda m, name: pickle.loads(pickle.dumps(m)),
    "state dict": lambda m, name: _loaded(m, name, assign=False),
    "assigned": lambda m, name: _loaded(m, name, assign=True),
}


@pytest.mark.parametrize("way, dtype, name", every(2 * list(WAYS), HALVES, WITH_STEPS))
def test_cast_modules_train(name: str, dtype: torch.dtype, way: str) -> None:
    """Outputs, weights and biases are of the new type, gradients those of their parameters."""
    module = WAYS[way](MODULES[name](linear()).to(dtype), name)
    x = X.to(dtype).requires_grad_()
    y = module(x)
    y.float().square().sum().backward()
    assert y.dtype == module.weight.dtype == module.bias.dtype == x.grad.dtype == dtype  # type: ignore
    for parameter in module.parameters():
        assert parameter.grad is not None and parameter.grad.dtype == parameter.dtype
        assert parameter.grad.isfinite().all()


@pytest.mark.parametrize("name, cast", every(WITH_STEPS, ["bfloat16", "half", "double", "float"]))
def test_steps_and_their_gradients_stay_float32(name: str, cast: str) -> None:
    """To the bit, there and back."""
    module = MODULES[name](linear())
    module(X).sum().backward()
    before = {n: (p.clone(), p.grad.clone()) for n, p in steps(module).items()}  # type: ignore
    getattr(module, cast)()
    assert module.weight.dtype == module.weight.grad.dtype == getattr(torch, cast)  # type: ignore
    module.float()
    assert {n: p.dtype for n, p in steps(module).items()} == dict.fromkeys(before, torch.float32)
    for n, p in steps(module).items():
        assert p.grad is not None
        assert torch.equal(p, before[n][0]) and torch.equal(p.grad, before[n][1])


@pytest.mark.parametrize("name", [n for n in MODULES if n != "functional"])
def test_modules_move_as_others_do(name: str) -> None:
    """To meta, to memory without values, and back."""
    module = MODULES[name](linear()).to("meta")
    assert {t.device.type for t in (*module.parameters(), *module.buffers())} == {"meta"}
    module.to_empty(device="cpu")
    module.load_state_dict(MODULES[name](linear()).state_dict())
    assert torch.equal(module(X), MODULES[name](linear())(X))


@pytest.mark.parametrize("name, default", every(WITH_STEPS, [torch.float64, *HALVES]))
def test_steps_do_not_follow_the_default_type(name: str, default: torch.dtype) -> None:
    """transformers sets it while it loads a model."""
    float_linear = linear()
    torch.set_default_dtype(default)
    try:
        module = MODULES[name](float_linear)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in steps(module).values()} == {torch.float32}
    assert torch.equal(module(X), MODULES[name](linear())(X))
