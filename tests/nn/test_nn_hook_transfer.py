"""Hooks, attributes and tensors of a linear go over to the module in its place."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import qfx
from qfx.host.modules import CALL_HOOKS, STATE_HOOKS
from qfx.ops.single_tensors import sqnr
from tests.lib.prepared import BY_ALL, BY_EACH, NEW, REPLACE, K, X, model


def _doubled(log: list[str]) -> Any:
    return lambda module, args, y: log.append("forward") or 2 * y


def _doubled_with_keywords(log: list[str]) -> Any:
    return lambda module, args, keywords, y: log.append(f"forward {len(keywords)}") or y + 1


def _shifted(log: list[str]) -> Any:
    return lambda module, args: log.append("pre") or (args[0] + 0.5 if args else args)


def _as_keyword(log: list[str]) -> Any:
    """Linears may be called by keyword from then on."""
    return lambda module, args, keywords: (
        log.append("pre with keywords") or ((), {"input": args[0] if args else keywords["input"]})
    )


def _backward(log: list[str]) -> Any:
    return lambda module, dx, dy: log.append(f"backward {len(dx)} {len(dy)}")


def _before_backward(log: list[str]) -> Any:
    return lambda module, dy: log.append("before backward") or (3 * dy[0],)


HOOKS: dict[str, Callable[[nn.Module, list[str]], Any]] = {
    "forward": lambda m, log: m.register_forward_hook(_doubled(log)),
    "forward, first": lambda m, log: m.register_forward_hook(_doubled(log), prepend=True),
    "forward with keywords": lambda m, log: m.register_forward_hook(
        _doubled_with_keywords(log), with_kwargs=True
    ),
    "forward, always": lambda m, log: m.register_forward_hook(_doubled(log), always_call=True),
    "pre": lambda m, log: m.register_forward_pre_hook(_shifted(log)),
    "pre, first": lambda m, log: m.register_forward_pre_hook(_shifted(log), prepend=True),
    "pre with keywords": lambda m, log: m.register_forward_pre_hook(
        _as_keyword(log), with_kwargs=True
    ),
    "backward": lambda m, log: m.register_full_backward_hook(_backward(log)),
    "before backward": lambda m, log: m.register_full_backward_pre_hook(_before_backward(log)),
}


def observed(f: nn.Module, log: list[str]) -> tuple[Tensor, Tensor, list[str]]:
    """Output, gradient of the input, and which hooks ran, also when the input is wrong."""
    log.clear()
    x = X.clone().requires_grad_()
    y = f(x)
    y.square().sum().backward()
    with pytest.raises(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        f(X[:, :5])
    assert x.grad is not None
    return y.detach(), x.grad, list(log)


@given(
    st.sampled_from(sorted(REPLACE)),
    st.lists(st.tuples(st.sampled_from(sorted(HOOKS)), st.sampled_from([0, 2])), max_size=5),
    st.data(),
)
def test_hooks_go_over_in_order_and_their_handles_remove_them(
    how: str, hooks: list[tuple[str, int]], data: st.DataObject
) -> None:
    log: list[str] = []
    before, after = model(), model()
    handles = [HOOKS[name](before[at], log) for name, at in hooks]
    REPLACE[how](before)
    REPLACE[how](after)
    after.load_state_dict(before.state_dict())  # steps are fitted to what hooks make of inputs
    plain = observed(after, log)
    late = [HOOKS[name](after[at], log) for name, at in hooks]
    gone = data.draw(st.sets(st.sampled_from(range(len(hooks))))) if hooks else set()
    for i in gone:
        handles[i].remove()
        late[i].remove()
    _same(observed(before, log), observed(after, log))
    for handle in handles:
        handle.remove()
    _same(observed(before, log), plain)
    assert all(type(before[i]) in NEW for i in (0, 2))


def _same(a: Any, b: Any) -> None:
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and a[2] == b[2]


def test_every_hook_of_torch_is_thought_of() -> None:
    assert {n for n in vars(nn.Module()) if "hook" in n} == {*CALL_HOOKS, *STATE_HOOKS}


# --- attributes ---


def give(linear: nn.Linear) -> None:
    linear._is_hf_initialized = True  # type: ignore[assignment]
    linear.note = {"kept": 1}  # type: ignore[assignment]
    linear.register_buffer("count", torch.zeros(2))
    linear.register_buffer("hidden", torch.ones(1), persistent=False)
    linear.gain = nn.Parameter(torch.full((1,), 2.0))
    linear.adapter = nn.Linear(K, K)
    linear.register_forward_hook(lambda m, args, y: m.gain * y + m.adapter(args[0]))


@BY_EACH
def test_attributes_tensors_and_children_go_over(how: str) -> None:
    m = model()
    give(m[0])  # type: ignore[arg-type]
    old, handed = m[0], (m[0].gain, m[0].count, m[0].hidden)
    m[0].eval()
    REPLACE[how](m)
    new: Any = m[0]
    assert new is not old and (new.gain, new.count, new.hidden) == handed and not new.training
    assert new._is_hf_initialized and new.note is old.note
    assert type(new) in NEW and type(new.adapter) is type(new)
    assert {"0.count", "0.gain"} <= m.state_dict().keys() and "0.hidden" not in m.state_dict()
    assert copy.deepcopy(m)(X).equal(m(X))


@BY_EACH
def test_shared_modules_are_replaced_once_with_their_hooks(how: str) -> None:
    shared = nn.Linear(K, K)
    m = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.Sequential(shared))})
    m["c"] = m["b"]  # the parent has two names as well
    calls: list[int] = []
    shared.register_forward_hook(lambda *_: calls.append(1))
    m.forward = lambda x: m["b"](m["a"](x))  # type: ignore[method-assign]
    REPLACE[how](m)
    calls.clear()
    m(X)
    assert m["a"] is m["b"][0] is m["b"][1][0] is m["c"][0] and len(calls) == 3
    assert type(m["a"]) in NEW


@BY_ALL
def test_features_are_those_of_the_weight(how: str) -> None:
    """Whoever cuts features off a layer seldom tells its attributes."""
    m = model()
    m[0].weight = nn.Parameter(m[0].weight[:, :24])
    x, made = X[:, :24], m
    prepare = {"prepare_binary": qfx.prepare_binary, "quantize_": lambda m, x: qfx.quantize_(m)}
    made = prepare.get(how, qfx.prepare_qat)(m, x)
    assert made[0].in_features == 24 and made(x).shape == (6, K)


@BY_EACH
def test_modules_may_be_called_by_keyword(how: str) -> None:
    m = REPLACE[how](model())
    assert torch.equal(m[0](input=X), m[0](X))


@BY_EACH
def test_random_numbers_are_not_touched(how: str) -> None:
    m, before = model(), torch.get_rng_state()
    REPLACE[how](m)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["forward", "pre", "pre with keywords", "forward with keywords"])
def test_hooks_that_went_over_are_compiled(name: str) -> None:
    m = model()
    HOOKS[name](m[0], [])
    hooked = m(X).detach()
    qfx.quantize_(m)
    y = torch.compile(m, backend="eager", fullgraph=True)(X)
    assert torch.equal(y, m(X)) and sqnr(hooked, y.detach()) > 25
