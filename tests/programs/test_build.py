"""Graphs of which PyTorch runs a part, that write in place, and whose values share memory: a
program gives what the graph gives, and leaves its inputs and constants as it does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from qfx.programs import build
from tests.programs.traced import aten, built, same

ops = torch.ops.qfx
C = torch.arange(12.0).reshape(3, 4)  # a constant
TIED = C.t()
CUT = C[1:]


def _pair(x: Any, y: Any) -> Any:
    return aten.add.Tensor(x, y), aten.mul.Tensor(x, y)


def _topk(x: Any, y: Any) -> Any:
    found = aten.topk.default(aten.mul.Tensor(x, y), 2)
    return found[0], found[1], aten.neg.default(found[0])


def _split(x: Any, y: Any) -> Any:
    parts = aten.split.Tensor(aten.add.Tensor(x, y), 2, 1)
    return aten.mul.Tensor(parts[0], parts[1]), parts[1]


def _write_own(x: Any, y: Any) -> Any:
    a = aten.add.Tensor(x, y)
    b = aten.mul.Tensor(a, 2)
    aten.add_.Tensor(a, 1)
    return aten.add.Tensor(a, b), b


def _write_view(x: Any, y: Any) -> Any:
    a = aten.add.Tensor(x, y)
    row = aten.select.int(a, 0, 1)
    before = aten.neg.default(a)
    aten.mul_.Scalar(row, 5)
    return aten.neg.default(a), before, row


def _write_view_of_view(x: Any, y: Any) -> Any:
    a = aten.add.Tensor(x, y)
    aten.copy_.default(aten.select.int(aten.permute.default(a, [1, 0]), 0, 2), 7.0)
    return aten.exp.default(aten.sigmoid.default(a))


def _write_input(x: Any, y: Any) -> Any:
    a = aten.mul.Tensor(x, 2)
    aten.copy_.default(x, y)
    return aten.add.Tensor(a, x), aten.neg.default(x)


def _index_copy(x: Any, y: Any) -> Any:
    at = torch.tensor([2, 0])
    a = aten.neg.default(x)
    aten.index_copy_.default(a, 0, at, aten.slice.Tensor(y, 0, 0, 2))
    return aten.add.Tensor(a, 1)


def _view_of_outside(x: Any, y: Any) -> Any:
    s = aten.sort.default(x)[0]
    v = aten.permute.default(s, [1, 0])
    return aten.mul.Tensor(v, 2), aten.add.Tensor(s, y)


def _late_view(x: Any, y: Any) -> Any:
    a = aten.add.Tensor(x, y)
    v = aten.slice.Tensor(a, 1, 1, 3)
    b = aten.neg.default(aten.exp.default(aten.abs.default(y)))
    s = aten.sort.default(v)[0]
    return aten.add.Tensor(s, aten.slice.Tensor(b, 1, 0, 2)), aten.neg.default(v)


def _twice(x: Any, y: Any) -> Any:
    a = aten.add.Tensor(x, y)
    return a, a, aten.permute.default(a, [1, 0]), x, C, aten.select.int(x, 0, 1)


def _constants(x: Any, y: Any) -> Any:
    return aten.add.Tensor(x, C), aten.add.Tensor(aten.permute.default(y, [1, 0]), TIED), CUT


def _cut_constants(x: Any, y: Any) -> Any:
    return aten.add.Tensor(aten.select.int(x, 0, 0), C[0]), aten.mul.Tensor(CUT, CUT)


def _write_between(x: Any, y: Any) -> Any:
    """In one program, by PyTorch, in the next."""
    a = aten.add.Tensor(x, y)
    b = aten.exp.default(a)
    aten.add_.Tensor(a, b)
    c = aten.mul.Tensor(a, b)
    aten.add_.Tensor(b, c)
    return aten.sub.Tensor(a, aten.add.Tensor(b, c))


def _norm(x: Any, y: Any) -> Any:
    """Writes and gives memory of its own at once."""
    row = aten.select.int(x, 0, 0)
    mean, var = aten.zeros_like.default(row), aten.ones_like.default(row)
    found = aten._native_batch_norm_legit.default(x, None, None, mean, var, True, 0.1, 1e-5)
    return found[0], aten.neg.default(found[1]), aten.add.Tensor(mean, y), var


def _activated_outside(x: Any, y: Any) -> Any:
    half = aten._to_copy.default(x, dtype=torch.bfloat16)
    bias = aten.select.int(half, 0, 0)
    return aten.relu.default(aten.add.Tensor(half, bias)), aten.neg.default(y)


def _other_types(x: Any, y: Any) -> Any:
    seen = aten.gt.Tensor(x, y)
    half = aten.clone.default(aten._to_copy.default(x, dtype=torch.bfloat16))
    whole = aten._to_copy.default(y, dtype=torch.int32)
    wide = aten.clone.default(aten._to_copy.default(x, dtype=torch.float64))
    sums = aten.add.Tensor(aten.clone.default(whole), whole), aten.mul.Tensor(half, y)
    return aten.clone.default(seen), half, *sums, wide, aten.mul.Tensor(x, seen)


def _empty(x: Any, y: Any) -> Any:
    none = aten.slice.Tensor(x, 1, 4, 9)
    low = aten.slice.Tensor(aten.slice.Tensor(y, 0, 3, 9), 1, 2, 9)
    sums = aten.add.Tensor(none, 1.0), aten.clone.default(low), aten.neg.default(low)
    return *sums, aten.cat.default([none, y], 1), aten.mean.dim(none, [-1])


def _dtype_view(x: Any, y: Any) -> Any:
    bits = aten.view.dtype(aten.neg.default(x), torch.int32)
    return aten.clone.default(bits), aten.view.dtype(
        aten.bitwise_and.Scalar(bits, -2), torch.float32
    )


def _foreach(x: Any, y: Any) -> Any:
    a, b = aten.neg.default(x), aten.neg.default(y)
    aten._foreach_add_.Scalar([a, b], 1)
    return aten.mul.Tensor(a, b)


def _out(x: Any, y: Any) -> Any:
    a = aten.neg.default(x)
    b = aten.exp.default(a)
    aten.add.out(x, y, out=a)
    return aten.mul.Tensor(a, b)


def _nothing_read(x: Any, y: Any) -> Any:
    aten.add.Tensor(x, y)
    aten.sort.default(x)
    return x, None, 3


def _scalars(x: Any, y: Any) -> Any:
    a = aten.select.int(aten.select.int(x, 0, 0), 0, 0)
    zeros = aten.div.Tensor(x, -0.0), aten.mul.Tensor(x, 0.0)
    return aten.mul.Tensor(y, a), aten.mean.dim(a, [-1]), *zeros


GRAPHS: dict[str, Callable[[Any, Any], Any]] = {
    f.__name__: f
    for f in (
        _pair, _topk, _split, _write_own, _write_view, _write_view_of_view, _write_input,
        _index_copy, _view_of_outside, _late_view, _twice, _constants, _cut_constants,
        _write_between, _norm, _activated_outside, _other_types, _empty, _dtype_view, _foreach,
        _out, _nothing_read, _scalars,
    )
}  # fmt: skip


def _inputs(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 4, generator=generator), torch.randn(3, 4, generator=generator)


def _close(found: Any, expected: Any) -> bool:
    if not isinstance(expected, Tensor):
        return bool(found == expected)
    if expected.dtype != torch.float32:
        return same(found, expected)
    return found.shape == expected.shape and torch.allclose(found, expected, 1e-6, 1e-6, True)


@pytest.mark.parametrize("name", GRAPHS)
def test_a_program_does_what_its_graph_does(name: str) -> None:
    gm = fx.symbolic_trace(GRAPHS[name])
    runner = build(gm, _inputs())
    for seed in range(3):
        given, expected_given = _inputs(seed), _inputs(seed)
        found, expected = runner(*given), gm(*expected_given)
        expected = (expected,) if isinstance(expected, Tensor) else expected
        assert len(found) == len(expected)
        for i, pair in enumerate(zip(found, expected, strict=True)):
            assert _close(*pair), (i, pair)
        assert all(same(a, b) for a, b in zip(given, expected_given, strict=True))
    assert torch.equal(C.flatten(), torch.arange(12.0))


def test_inputs_that_share_memory_share_what_is_written() -> None:
    def f(x: Any, y: Any) -> Any:
        a = aten.mul.Tensor(y, 2)
        aten.add_.Tensor(x, 1)
        return aten.add.Tensor(a, y), aten.neg.default(x)

    gm = fx.symbolic_trace(f)
    runner = build(gm, _inputs())
    wide, also = torch.randn(6, 4), torch.empty(6, 4)
    also.copy_(wide)
    found, expected = runner(wide[:3], wide[2:5]), gm(also[:3], also[2:5])
    assert all(same(a, b) for a, b in zip((*found, wide), (*expected, also), strict=True))


def test_a_constant_that_is_written_stays_written() -> None:
    held = torch.zeros(3, 4)

    def f(x: Any) -> Any:
        before = aten.add.Tensor(x, held)
        aten.add_.Tensor(held, x)
        return before, aten.add.Tensor(x, held)

    x = torch.ones(3, 4)
    runner = built(f, (x,))
    held.zero_()
    assert [t.unique().tolist() for t in (*runner(x), held)] == [[1.0], [2.0], [1.0]]
    assert [t.unique().tolist() for t in (*runner(x), held)] == [[2.0], [3.0], [2.0]]


def test_results_do_not_share_memory_between_calls() -> None:
    runner = built(_twice, _inputs())
    first, second = runner(*_inputs()), runner(*_inputs(1))
    kept = [t.clone() for t in first]
    second[0].zero_()
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))
    assert first[0].data_ptr() == first[1].data_ptr() == first[2].data_ptr()


class _Adds(nn.Module):
    """Writes to what it is given, as no schema says."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


def test_a_module_may_write_to_what_it_is_given() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(aten.neg.default, (x,))
    b = graph.call_function(aten.exp.default, (a,))
    c = graph.call_module("adds", (a,))
    graph.output((graph.call_function(aten.mul.Tensor, (c, b)),))
    root = nn.Module()
    root.adds = _Adds()
    gm = fx.GraphModule(root, graph)
    x = torch.randn(5)
    (found,), (expected,) = build(gm, (x,))(x), gm(x)
    assert _close(found, expected)


def test_an_assertion_that_pytorch_makes_is_made() -> None:
    def f(x: Any) -> Any:
        aten._assert_async.msg(aten.ge.Scalar(aten.select.int(x, 0, 0), 0), "x is negative")
        return aten.neg.default(x)

    runner = built(f, (torch.ones(2),))
    assert runner(torch.ones(2))[0].tolist() == [-1, -1]
    with pytest.raises(RuntimeError, match="x is negative"):
        runner(-torch.ones(2))
    assert runner(torch.ones(2))[0].tolist() == [-1, -1]


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "a new shape": (lambda x: (aten.t_.default(aten.neg.default(x)),), "a tensor in place"),
    "a number of values": (lambda x: (aten.add.Scalar(x, aten.item.default(x)),), "values of"),
    "a size of values": (lambda x: (aten.nonzero.default(x),), "values of tensors"),
    "another device": (lambda x: (aten._to_copy.default(x, device="meta"),), "on meta"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_program_can_hold_is_said(name: str) -> None:
    f, why = REFUSED[name]
    with pytest.raises(NotImplementedError, match=why):
        built(f, (torch.ones(1, 1),))


def test_a_graph_is_not_changed() -> None:
    gm = fx.symbolic_trace(_write_between)
    before = copy.deepcopy(gm.graph)
    build(gm, _inputs())
    assert str(gm.graph) == str(before)
