"""The int8 gradient of the input of a linear whose weight is frozen, (T3): of every layout of a
weight, in parts of a sum, and with the transposed codes kept from step to step."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor

import qfx
from qfx.ops import int8_gradients
from qfx.ops.layout import layout_of
from qfx.ops.storage import quantized
from qfx.ops.weight_values import weight_values
from qfx.values.scheme import QSpec
from qfx.weights import frozen_gradient
from tests.conftest import on_isa
from tests.lib.models import compiled
from tests.lib.strategies import SEEDS

ops = torch.ops.qfx
SPECS = {
    "rows": QSpec(),
    "zero points": QSpec(symmetric=False),
    "groups": QSpec(group=32),
    "4 bits": QSpec(bits=4, symmetric=False, group=32, packed=True),
    "5 bits": QSpec(bits=5, symmetric=False, group=64, packed=True),
}
EXACT = ("rows",)  # nothing of the weight is rounded again


def drawn(spec: QSpec, n: int, k: int, seed: int = 0) -> tuple[Tensor, list[int]]:
    """A packed weight [n, k] and its layout."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(n, k, generator=g) * (1 + torch.arange(n)[:, None] % 5)
    packed, _ = quantized(w, spec, spec.group, 0, k, None)
    return packed, layout_of(spec, spec.group, n)


def gradient(grad: Tensor, weight: Tensor, layout: list[int], k: int, seed: int = 0) -> Tensor:
    key = torch.tensor([seed])
    found: Tensor = ops.frozen_gradient(grad, weight, layout, k, key, torch.float32)
    return found


def bound(name: str, grad: Tensor, w: Tensor) -> Tensor:
    """Of the error: less than a step for each element of the gradient, half a step for each of the
    weight where it is rounded again, and the roundings of float32."""
    g, w = grad.double(), w.double()
    if name in EXACT:
        scale = w.abs().amax(1) / 127  # of rows of w: the factor of the gradient
        codes = (w / scale.clamp(min=1e-300)[:, None]).abs()
        step = (g * scale).abs().amax(1, keepdim=True) / 127
        found = step * codes.sum(0)
    else:
        step = g.abs().amax(1, keepdim=True) / 127
        half = w.abs().amax(0, keepdim=True) / 254
        found = step * (w.abs() + half).sum(0) + g.abs().sum(1, keepdim=True) * half
    return found * 1.001 + (len(w) + 16) * 2.0**-22 * (g.abs() @ w.abs()) + 1e-30


@given(st.sampled_from([*SPECS]), st.integers(1, 40), st.integers(1, 5), st.integers(0, 9), SEEDS)
def test_every_layout_is_within_its_bound(
    name: str, n: int, blocks: int, m: int, seed: int
) -> None:
    k = 64 * blocks
    weight, layout = drawn(SPECS[name], n, k, seed)
    grad = torch.randn(m, n, generator=torch.Generator().manual_seed(seed + 1))
    w = weight_values(weight, layout, k, torch.float32)
    error = (gradient(grad, weight, layout, k, seed).double() - grad.double() @ w.double()).abs()
    assert (error <= bound(name, grad, w)).all()


@pytest.mark.parametrize("name", SPECS)
def test_parts_of_a_long_sum(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part rounds its own columns of the gradient."""
    monkeypatch.setattr(int8_gradients, "LARGEST_K", 7)
    weight, layout = drawn(SPECS[name], 24, 64)
    grad = torch.randn(5, 24, generator=torch.Generator().manual_seed(1))
    w = weight_values(weight, layout, 64, torch.float32)
    parts = [slice(at, at + 7) for at in range(0, 24, 7)]
    most = sum(bound(name, grad[:, part], w[part]) for part in parts)
    error = (gradient(grad, weight, layout, 64).double() - grad.double() @ w.double()).abs()
    assert (error <= most).all()  # type: ignore[operator]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("m, n", [(70_000, 8), (3, 70_000)])
def test_more_terms_than_int32_holds(m: int, n: int, frozen: bool) -> None:
    """The head of a large vocabulary, and the tokens of a large batch. Regression: it raised."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(16, n).requires_grad_(not frozen)
    x = torch.randn(m, 16, requires_grad=True)
    grad = torch.randn(m, n)
    compiled(linear, backward="int8", inner="eager")(x).backward(grad)
    wanted = [x] if frozen else [x, linear.weight]
    expected = torch.autograd.grad(linear(x), wanted, grad)
    for leaf, exact in zip(wanted, expected, strict=True):
        assert leaf.grad is not None
        assert torch.cosine_similarity(leaf.grad.ravel(), exact.ravel(), 0) > 0.995


@pytest.fixture
def turned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The weights that were turned, in order."""
    found: list[Any] = []
    turn = frozen_gradient.turned_weight

    def counted(weight: Tensor, *how: Any) -> Any:
        found.append(tuple(weight.shape))
        return turn(weight, *how)

    monkeypatch.setattr(frozen_gradient, "turned_weight", counted)
    return found


def test_a_weight_is_turned_once_until_it_changes(turned: list[Any]) -> None:
    weight, layout = drawn(QSpec(), 24, 64)
    grad = torch.randn(5, 24)
    first = gradient(grad, weight, layout, 64)
    assert torch.equal(gradient(grad, weight, layout, 64), first) and len(turned) == 1
    other, _ = drawn(QSpec(), 24, 64, seed=1)
    weight.copy_(other)
    changed = gradient(grad, weight, layout, 64)
    assert torch.equal(changed, gradient(grad, other, layout, 64)) and len(turned) == 3
    assert not torch.equal(changed, first)
    with on_isa("ref"):
        assert torch.equal(gradient(grad, weight, layout, 64), changed) and len(turned) == 4


def test_nothing_is_kept_of_a_weight_that_is_freed() -> None:
    gc.collect()
    gradient(torch.ones(1, 24), *drawn(QSpec(), 24, 64), 64)
    for seed in range(4):
        gradient(torch.ones(1, 24), *drawn(QSpec(), 24, 64, seed), 64)
    alive = [kept for kept in frozen_gradient._KEPT.values() if not kept.storage.expired()]
    assert len(frozen_gradient._KEPT) <= len(alive) + 1


def one_element(weight: Any, model: Any) -> None:
    with torch.no_grad():
        weight[0, 0] = 3.0


def halved(weight: Any, model: Any) -> None:
    with torch.no_grad():
        weight.mul_(0.5)


def other_data(weight: Any, model: Any) -> None:
    weight.data = torch.randn(128, 128)


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
@pytest.mark.parametrize(
    "change", [lambda _, model: model.merge_adapter(), one_element, halved, other_data]
)
def test_whoever_changes_the_base_is_noticed(
    scheme: str, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient after a change has the bits that it has where nothing is kept."""
    base = stack(scheme, "int8")
    weight = base[0].weight
    model: Any = get_peft_model(base, LoraConfig(r=4, target_modules=["0", "1"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    x = torch.randn(16, 128, requires_grad=True)

    def gradient_of_x() -> Tensor:
        torch.manual_seed(0)
        (found,) = torch.autograd.grad(model(x).square().sum(), x)
        return found

    before = gradient_of_x()
    change(weight, model)
    after = gradient_of_x()
    monkeypatch.setattr(frozen_gradient, "_KEPT", {})
    assert torch.equal(gradient_of_x(), after) and not torch.equal(after, before)


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
def test_batched_gradients_are_those_one_by_one(scheme: str) -> None:
    x = torch.randn(5, 128, requires_grad=True)
    y = stack(scheme, "int8")(x)
    batch = torch.randn(3, *y.shape, generator=torch.Generator().manual_seed(0))
    (batched,) = torch.autograd.grad(y, x, batch, is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(y, x, g, retain_graph=True)[0] for g in batch]
    assert torch.equal(batched, torch.stack(single))


def stack(scheme: str, backward: str) -> torch.nn.Sequential:
    torch.manual_seed(0)
    linears = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(3)))
    return qfx.quantize_(linears, qfx.Config(scheme=scheme, backward=backward))  # type: ignore


@pytest.mark.parametrize("way", ["eager", "compiled", "aot"])
@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-asymmetric", "w8a8-groups", "w4a8"])
def test_modules_keep_what_they_turned(scheme: str, way: str, turned: list[Any]) -> None:
    """Three linears are turned at the first of three steps, and the gradient is that of float
    weights with the same codes."""
    x = torch.randn(32, 128, requires_grad=True)
    (expected,) = torch.autograd.grad(stack(scheme, "float")(x).square().sum(), x)
    model: Any = stack(scheme, "int8")
    if way != "eager":
        inner = "eager" if way == "compiled" else "aot_eager"
        model = compiled(model, inner=inner, minimum_gain=0)
    optimizer = torch.optim.AdamW([x], lr=0.0)
    for _ in range(3):
        optimizer.step()
        x.grad = None
        model(x).square().sum().backward()
        assert x.grad is not None
        assert torch.cosine_similarity(x.grad.ravel(), expected.ravel(), 0) > 0.995
    assert len(turned) == 3
