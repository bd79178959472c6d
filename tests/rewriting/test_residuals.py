"""Residuals: additions after int8 convolutions become part of their epilogue, where that reads what
the model reads, and the plan says why others stay apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qfx
from qfx.ops.single_tensors import sqnr
from tests.rewriting.test_convolutions import called, compiled

C = 32
KERNELS: dict[str, Callable[..., nn.Module]] = {
    "3x3": lambda **how: nn.Conv2d(C, C, 3, padding=1, **how),
    "groups": lambda **how: nn.Conv2d(C, C, 3, padding=1, groups=2, **how),
}


class Residual(nn.Module):
    """Convolutions f and g of an image, and what is made of f(a) and a, where a = g(x)."""

    def __init__(self, kernel: str, end: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.g, self.f = (KERNELS[kernel]() for _ in range(2))
        self.norm = nn.BatchNorm2d(C)
        self.end = end
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.g(x))
        return self.end(self.norm(self.f(a)), a)


def _in_place(y: Tensor, a: Tensor) -> Tensor:
    y += a
    return F.relu(y, inplace=True)


ENDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "y + a": lambda y, a: y + a,
    "relu(y + a)": lambda y, a: F.relu(y + a),
    "y += a; relu_(y)": _in_place,
    "y.add(a)": lambda y, a: y.add(a),
    "silu(torch.add(a, y))": lambda y, a: F.silu(torch.add(a, y)),
    "a is read again": lambda y, a: (y + a) * a,
    "the sum is read again": lambda y, a: F.relu(s := y + a) + s.square(),
    "a is scaled": lambda y, a: y + a * 2,
}


def image(*sizes: int) -> Tensor:
    return torch.randn(sizes or (2, C, 6, 5), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("end", ENDS)
def test_an_addition_becomes_part_of_the_convolution(kernel: str, end: str) -> None:
    model, x = Residual(kernel, ENDS[end]), image()
    with torch.no_grad():
        gm, _ = qfx.rewrite(qfx.trace(model, x), qfx.Config(minimum_gain=0))
        (fused,) = (n for n in gm.graph.nodes if "residual" in n.name)
        assert called(gm).count("conv_dynamic") == 2
        assert fused.args[9] == ("silu" if "silu" in end else fused.args[9])
        assert sqnr(model(x), gm(x)) > 30
        for inner in ("eager", "inductor"):
            y = compiled(model, inner=inner)(x)
            assert sqnr(model(x), y) > 30 and y.stride() == model(x).stride()


def test_the_bits_are_those_of_an_addition_apart() -> None:
    """In float32, where nothing is rounded in between."""
    results = []
    for end in (ENDS["relu(y + a)"], lambda y, a: F.relu(torch.sub(y, -a))):
        model = Residual("3x3", end)
        with torch.no_grad():
            gm, _ = qfx.rewrite(qfx.trace(model, image()), qfx.Config(minimum_gain=0))
            results.append(gm(image()))
    assert torch.equal(*results)


def test_linears_leave_additions_to_inductor() -> None:
    model, x = Residual("3x3", ENDS["y + a"]), image()
    model.f = nn.Conv2d(C, C, 1)
    with torch.no_grad():
        gm, _ = qfx.rewrite(qfx.trace(model, x), qfx.Config(minimum_gain=0))
        assert sqnr(model(x), gm(x)) > 30
    assert "linear_dynamic" in called(gm) and "add" in called(gm)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves(dtype: torch.dtype) -> None:
    model, x = Residual("3x3", ENDS["relu(y + a)"]).to(dtype), image().to(dtype)
    with torch.no_grad():
        assert sqnr(model.float()(x.float()), compiled(model.to(dtype))(x)) > 28


def test_of_two_convolutions_the_later_one_adds() -> None:
    model = Residual("3x3", lambda y, a: y)
    model.end = lambda y, a: F.relu(y + model.g(a * 2))
    x = image()
    with torch.no_grad():
        gm, _ = qfx.rewrite(qfx.trace(model, x), qfx.Config(minimum_gain=0))
        names = [n.name for n in gm.graph.nodes if n.op == "call_function"]
        assert sqnr(model(x), gm(x)) > 25
    assert sum("residual" in name for name in names) == 1 and "add" not in called(gm)


APART: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "an activation is between": (lambda y, a: F.relu(y) + a, "an activation function comes"),
    "it is one for each channel": (
        lambda y, a: y + a.mean((2, 3), keepdim=True), "what is added has another shape",
    ),
    "the convolution is broadcast": (
        lambda y, a: y[:1].clone() + a, "",
    ),
    "its channels are first in memory": (
        lambda y, a: y + torch.ones(2, C, 6, 5), "do not lie last in memory",
    ),
    "it has another type": (lambda y, a: y + a.to(torch.float64), "torch.float64 is added"),
    "it is scaled by the call": (lambda y, a: torch.add(y, a, alpha=2), ""),
    "the convolution is read again": (lambda y, a: (y + a) * y, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_others_stay_apart_and_say_why(name: str) -> None:
    end, reason = APART[name]
    model, x = Residual("3x3", end), image()
    with torch.no_grad():
        gm, plan = qfx.rewrite(qfx.trace(model, x), qfx.Config(minimum_gain=0))
        assert sqnr(model(x), gm(x)) > 30
    assert not [n for n in gm.graph.nodes if "residual" in n.name]
    assert reason in plan.entries[1].reason, plan.entries[1].reason


def test_a_residual_that_is_written_is_read_again() -> None:
    def end(y: Tensor, a: Tensor) -> Tensor:
        b = a.view_as(a)
        a += y
        return a * b

    model = Residual("3x3", end)
    with torch.no_grad():
        assert sqnr(model(image()), compiled(model)(image())) > 25


def test_what_is_written_before_the_addition_is_read_before() -> None:
    """The convolution would run where the addition is."""
    model, x = Residual("3x3", lambda y, a: y), image()

    def end(y: Tensor, a: Tensor) -> Tensor:
        b = model.g(a)
        a.mul_(2)
        return y + b

    model.end = end
    with torch.no_grad():
        gm, _ = qfx.rewrite(qfx.trace(model, x), qfx.Config(minimum_gain=0))
        assert sqnr(model(x), gm(x)) > 25


def test_gradients_flow_to_both() -> None:
    model, x = Residual("3x3", ENDS["relu(y + a)"]), image()
    gradients: list[Any] = []
    for f in (model, compiled(model, inner="aot_eager")):
        model.zero_grad()
        f(x).square().sum().backward()
        gradients.append(model.g.weight.grad)
    assert sqnr(*gradients) > 20


def test_a_residual_that_alone_has_a_gradient_keeps_it() -> None:
    model, x = Residual("3x3", ENDS["y + a"]).requires_grad_(False), image()
    shift = nn.Parameter(torch.ones(C, 1, 1))

    def f(x: Tensor) -> Tensor:
        a = F.relu(model.g(x))
        return model.norm(model.f(a)) + a * shift

    compiled(f, inner="aot_eager")(x).sum().backward()
    wanted = F.relu(model.g(x)).sum((0, 2, 3))
    assert shift.grad is not None and sqnr(wanted, shift.grad.flatten()) > 30


@pytest.mark.parametrize("kernel", KERNELS)
def test_sizes_that_change(kernel: str) -> None:
    model = Residual(kernel, ENDS["relu(y + a)"])
    f = torch.compile(model, backend="qfx", dynamic=True, options={"minimum_gain": 0})
    with torch.no_grad():
        for sizes in ((2, C, 6, 5), (1, C, 9, 12), (3, C, 7, 7)):
            assert sqnr(model(image(*sizes)), f(image(*sizes))) > 30
