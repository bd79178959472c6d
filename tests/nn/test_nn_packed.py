"""Modules that train pack their weight once in eval mode, and never serve a stale one."""

from __future__ import annotations

import copy
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qfx
from qfx.nn import BinaryLinear, LSQLinear
from tests.lib.pairs import every

X = torch.randn(32, 24, generator=torch.Generator().manual_seed(0))
TENSOR4 = qfx.Scheme(x=qfx.QSpec(bits=4, axes=qfx.PER_TENSOR), w=qfx.QSpec(4, axes=qfx.PER_TENSOR))
MODULES: dict[str, Callable[[], nn.Module]] = {
    "lsq per tensor": lambda: LSQLinear(24, 16, scheme=TENSOR4, shift=True),
    "lsq per row": lambda: LSQLinear(24, 16, scheme=qfx.Scheme(w=qfx.QSpec(4))),
    "binary per row": lambda: BinaryLinear(24, 16, shift=True),
    "binary per tensor": lambda: BinaryLinear(24, 16, axes=qfx.PER_TENSOR),
}
PACKERS = {"lsq": "qfx.nn.learned_steps.lsq_packed", "binary": "qfx.nn.binary.binary_packed"}


def made(name: str) -> Any:
    torch.manual_seed(0)
    module: Any = MODULES[name]()
    module.observe(X)
    return module.eval()


def outputs(module: nn.Module) -> Tensor:
    with torch.no_grad():
        return module(X)


def step(module: Any, **options: Any) -> None:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.3, **options)
    module(X).square().sum().backward()
    optimizer.step()


def one_element(module: Any) -> None:
    """A step that counts no version, on an element that no sample has."""
    module.weight.grad = torch.zeros(16, 24)
    module.weight.grad[15, 23] = 50
    torch.optim.SGD([module.weight], lr=1.0, fused=True).step()


def trained(module: Any) -> None:
    module.train()
    step(module)
    module.eval()


def loaded(module: Any) -> None:
    other = copy.deepcopy(module)
    step(other)
    module.load_state_dict(other.state_dict())


def assigned(module: Any) -> None:
    other = copy.deepcopy(module)
    step(other)
    module.load_state_dict(other.state_dict(), assign=True)


def swapped(module: Any) -> None:
    """The old weight dies first, so that the new one may get its address."""
    values = -module.weight.detach().clone().flip(0)
    module.weight.data = torch.empty(0)
    module.weight.data = values


def replaced(module: Any) -> None:
    values = -module.weight.detach().clone().flip(0)
    del module.weight
    module.weight = nn.Parameter(values)


def unseen(module: Any) -> None:
    module.weight.data.neg_()
    qfx.invalidate(module)


EVENTS: dict[str, Callable[[Any], None]] = {
    "optimizer": step,
    "fused optimizer": lambda module: step(module, fused=True),
    "fused optimizer, one element": one_element,
    "eval, train, eval": trained,
    "load_state_dict": loaded,
    "load_state_dict, assign": assigned,
    "in place": lambda module: module.weight.detach().neg_(),
    "another storage": swapped,
    "another parameter": replaced,
    "invalidate": unseen,
}


@pytest.mark.parametrize("event, name", every(EVENTS, MODULES))
def test_never_stale(name: str, event: str) -> None:
    """After each event the output is that of a module which never packed before."""
    module = made(name)
    before = outputs(module)
    EVENTS[event](module)
    fresh: Any = MODULES[name]()
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(outputs(module), outputs(fresh.eval()))
    assert not torch.equal(outputs(module), before)


def test_a_new_step_packs_again() -> None:
    module = made("lsq per row")
    before = outputs(module)
    with torch.no_grad():
        module.w_log_step += 0.5
    assert not torch.equal(outputs(module), before)


@pytest.mark.parametrize("name", MODULES)
def test_packed_once_in_eval_and_each_time_in_training(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, packs = PACKERS[name.split()[0]], []
    original = pkgutil.resolve_name(target)
    module = made(name)
    monkeypatch.setattr(target, lambda *a: packs.append(1) or original(*a))
    in_eval = [outputs(module) for _ in range(3)]
    assert len(packs) == 1
    module(X).sum().backward()  # recording gradients packs no second time
    assert len(packs) == 1
    in_training = outputs(module.train())
    assert all(torch.equal(y, in_training) for y in in_eval)


@pytest.mark.parametrize("name", MODULES)
def test_copies_and_pickles_start_empty(name: str) -> None:
    module = made(name)
    expected = outputs(module)
    copied = copy.deepcopy(module)
    step(module)
    assert torch.equal(outputs(copied), expected)
    step(copied)
    assert torch.equal(outputs(copied), outputs(module))


@pytest.mark.parametrize("name", MODULES)
def test_compiled_in_eval_follows_the_weight(name: str) -> None:
    module = made(name)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.equal(outputs(compiled), outputs(module))
    step(module, fused=True)
    assert torch.equal(outputs(compiled), outputs(module))
