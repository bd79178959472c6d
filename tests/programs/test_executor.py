"""What a Runner is given, by whom, and what becomes of it."""

from __future__ import annotations

import copy
import os
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import qfx._C as _C
from qfx.ops.code import Code
from qfx.ops.layout import Layout
from qfx.programs import Runner
from qfx.programs.inputs import Bound
from tests.programs.traced import aten, built, same_bits
from tests.programs.written import floats, say

ops = torch.ops.qfx
CODES = torch.randint(-127, 128, (64, 64), dtype=torch.int8)
W = ops.pack_weight.default(CODES, torch.rand(64) / 100)
HOW: Any = list(Layout(64)), None, list(Code()), "none", torch.float32


def _linear(x: Any) -> Any:
    return ops.linear_dynamic.default(x, W, *HOW)


def _steps(x: Any) -> Any:
    """Two programs, and PyTorch between them."""
    y = aten.sort.default(_linear(aten.mul.Tensor(x, 2)))[0]
    return _linear(aten.add.Tensor(y, x)), y


def _runner() -> Runner:
    return built(_steps, (torch.zeros(8, 64),))


def _equal(runner: Runner, x: Tensor) -> bool:
    return all(same_bits(a, b) for a, b in zip(runner(x), _steps(x), strict=True))


@pytest.mark.parametrize("runners", [1, 2])
def test_threads_take_turns(runners: int) -> None:
    made = [_runner() for _ in range(runners)]
    wrong: list[int] = []

    def work(i: int) -> None:
        for round_ in range(20):
            x = torch.full((8, 64), float(i + round_)) * torch.arange(64)
            if not _equal(made[i % runners], x):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_runs_it() -> None:
    runner, x = _runner(), torch.randn(8, 64)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # those of torch do not live on in a fork
    try:
        expected = runner(x)
        child = os.fork()
        if child == 0:
            os._exit(0 if all(map(torch.equal, runner(x), expected)) else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(threads)
    assert _equal(runner, x)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_is_not_copied(how: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="neither copied nor pickled"):
        how(_runner())


X = torch.zeros(8, 64)
REFUSED: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
    "none": ((), TypeError, "0 inputs, expected 1"),
    "two": ((X, X), TypeError, "2 inputs, expected 1"),
    "shape": ((X[:4],), ValueError, r"float32 \(4, 64\), expected torch.float32 \(8, 64\)"),
    "axes": ((X[None],), ValueError, r"\(1, 8, 64\)"),
    "type": ((X.double(),), ValueError, "torch.float64"),
    "strides": ((torch.zeros(64, 8).t(),), ValueError, r"strides \(1, 8\)"),
    "expanded": ((torch.zeros(1, 64).expand(8, 64),), ValueError, r"strides \(0, 1\)"),
    "device": ((X.to("meta"),), ValueError, "on meta"),
    "negated": ((torch._neg_view(X),), ValueError, "contiguous"),
    "no tensor": (([1.0],), TypeError, "a list, expected a tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_inputs_that_it_is_not_for(name: str) -> None:
    runner = _runner()
    given, error, why = REFUSED[name]
    with pytest.raises(error, match=why):
        runner(*given)
    assert _equal(runner, torch.randn(8, 64))


CHANGED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "fewer rows": (lambda x: x.resize_(4, 64), r"\(4, 64\)"),
    "other memory": (lambda x: x.set_(torch.zeros(64, 8).t()), r"strides \(1, 8\)"),  # type: ignore[call-overload]
    "other axes": (lambda x: x.as_strided_((8, 64), (0, 1)), r"strides \(0, 1\)"),
    "another type": (lambda x: setattr(x, "data", x.double()), "torch.float64"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_an_input_that_was_changed_since_is_looked_at_again(name: str) -> None:
    runner, x = _runner(), torch.randn(8, 64)
    change, why = CHANGED[name]
    runner(x)
    change(x)
    with pytest.raises(ValueError, match=why):
        runner(x)


def test_an_input_that_moved_is_read_where_it_is() -> None:
    runner, x = _runner(), torch.randn(8, 64)
    runner(x)
    x.data = torch.randn(8, 64)
    assert _equal(runner, x)


def test_it_does_not_keep_its_inputs() -> None:
    runner, x = _runner(), torch.randn(8, 64)
    runner(x)
    held = weakref.ref(x)
    del x
    assert held() is None


@pytest.mark.parametrize("given", [(), (X, X), ([1.0],)])
def test_inputs_that_it_is_not_built_for(given: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match="expected"):
        built(_steps, given)


def test_inference_tensors_parameters_and_parts_of_memory() -> None:
    runner, x = _runner(), torch.randn(8, 64)
    with torch.inference_mode():
        made = x.clone()
        assert _equal(runner, made)
    assert _equal(runner, made)
    wide = torch.randn(12, 64)
    assert _equal(runner, wide[3:11])
    (found, _) = runner(torch.nn.Parameter(x))
    assert not found.requires_grad and torch.equal(found, _steps(x)[0])


def test_instruction_sets_may_change_between_calls() -> None:
    runner, x, before = _runner(), torch.randn(8, 64), _C.isa()
    try:
        for isa in (*_C.isas(), before):
            _C.set_isa(isa)
            assert _equal(runner, x)
    finally:
        _C.set_isa(before)


def test_it_is_usable_after_an_error_inside() -> None:
    table = torch.randn(5, 4)
    runner = built(
        lambda i: aten.neg.default(aten.embedding.default(table, i)), (torch.tensor([0]),)
    )
    with pytest.raises(IndexError, match="token 9 is none of the 5 of the vocabulary"):
        runner(torch.tensor([9]))
    assert torch.equal(runner(torch.tensor([4]))[0], -table[4:])


def _adding(constant: Tensor) -> Callable[[Any], Any]:
    return lambda x: aten.add.Tensor(x, constant)


def test_constants_live_as_long_as_it() -> None:
    held = torch.randn(8, 64)
    expected = held.clone()
    runner = built(_adding(held), (X,))
    del held
    for _ in range(4):
        torch.empty(8, 64).fill_(9)
    assert torch.equal(runner(X)[0], expected)


def test_the_default_type_and_device_are_not_its_own() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            runner = built(lambda x: aten.sort.default(aten.mul.Tensor(x, 2.5))[0], (X,))
            (found,) = runner(X + 1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, torch.full((8, 64), 2.5))


def _two(x: Any, cache: Any) -> Any:
    return aten.add.Tensor(_linear(x), cache), aten.sort.default(cache)[0]


def _alone(x: Any, cache: Any) -> Any:
    return aten.add.Tensor(_linear(x), cache)


@pytest.mark.parametrize("f", [_two, _alone])
def test_bound_inputs(f: Callable[..., Any]) -> None:
    """In turn, so that each call but the first finds the memory of another."""
    x = torch.randn(8, 64)
    runner, caches = built(f, (x, x)), [torch.randn(8, 64) for _ in range(3)]
    bounds = [Bound([cache]) for cache in caches]
    for number in (0, 0, 1, 0, 2, 2, 1, 0):
        caches[number] += 1
        x, expected = torch.randn(8, 64), None
        expected = f(x, caches[number])
        expected = expected if isinstance(expected, tuple) else (expected,)
        for found in (runner(x, bound=bounds[number]), runner(x, caches[number])):
            assert all(map(same_bits, found, expected))


def test_bound_inputs_serve_several_runners() -> None:
    x = torch.randn(8, 64)
    runners, bound = [built(_alone, (x, x)) for _ in range(2)], Bound([torch.randn(8, 64)])
    for runner in runners * 2:
        assert same_bits(runner(x, bound=bound)[0], _alone(x, *bound.tensors))


BOUND: dict[str, tuple[list[Any], type[Exception], str]] = {
    "none": ([], TypeError, "1 inputs, expected 2"),
    "two": ([X, X], TypeError, "3 inputs, expected 2"),
    "shape": ([X[:4]], ValueError, r"float32 \(4, 64\)"),
    "no tensor": ([1.0], TypeError, "a float, expected a tensor"),
}


@pytest.mark.parametrize("name", BOUND)
def test_bound_inputs_that_it_is_not_for(name: str) -> None:
    given, error, why = BOUND[name]
    runner, bound = built(_alone, (X, X)), Bound(given)
    for _ in range(2):
        with pytest.raises(error, match=why):
            runner(X, bound=bound)
    assert same_bits(runner(X, bound=Bound([X]))[0], _alone(X, X))


def test_bound_inputs_are_not_kept() -> None:
    runner, cache = built(_alone, (X, X)), torch.randn(8, 64)
    bound, held = Bound([cache]), weakref.ref(cache)
    runner(X, bound=bound)
    del bound, cache
    assert held() is None


def test_a_program_runs_on_new_addresses_at_some_places() -> None:
    program = _C.Program(say("copy", floats(1, 16), floats(2, 16)), [64, 64, 64], [0, 0, 0])
    a, b, c = torch.zeros(16), torch.arange(16.0), torch.ones(16)
    at = [t.data_ptr() for t in (a, b, c)]
    wrong: tuple[tuple[list[int], list[int], str], ...] = (
        ([0, 1], [at[0]], "got 2 and 1"),
        ([2], [at[0]], "place 2 is none of the 2"),
        ([-1], [at[0]], "place -1 is none"),
        ([1], [0], "address 1 of a program is null"),
    )
    with pytest.raises(ValueError, match="a program that ran on all of its 2 addresses"):
        program.run([0], [at[0]])
    program.run(at[:2])
    assert torch.equal(a, b)
    program.run([1], [at[2]])
    assert torch.equal(a, c)
    for places, given, why in wrong:
        with pytest.raises(ValueError, match=why):
            program.run(places, given)
    program.run([1], [at[1]])
    assert torch.equal(a, b)
