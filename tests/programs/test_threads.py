"""Of so many elements that threads share them, instructions give what one thread gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qfx.ops.kv_cache import kv_empty
from tests.conftest import on_threads
from tests.programs.traced import aten, built, same_bits

ops = torch.ops.qfx
MANY = (33, 7, 450)  # 104,000 elements, odd ones
CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "one run": (lambda a, b: aten.add.Tensor(a, b), (MANY, MANY)),
    "a function": (lambda a: aten.relu.default(a), (MANY,)),
    "runs of a broadcast": (lambda a, b: aten.mul.Tensor(a, b), (MANY, (33, 1, 450))),
    "runs of one number": (lambda a, b: aten.sub.Tensor(a, b), (MANY, (33, 7, 1))),
    "an axis in another place": (
        lambda a, b: aten.mul.Tensor(aten.transpose.int(a, 0, 2), b),
        (MANY, (450, 7, 33)),
    ),
    "two long runs": (lambda a, b: aten.add.Tensor(a, b), ((2, 50_000), (2, 1))),
    "columns": (lambda a, b: aten.cat.default([a, b], 2), (MANY, (33, 7, 50))),
}


@pytest.mark.parametrize("name", CASES)
def test_many_elements(name: str) -> None:
    f, shapes = CASES[name]
    given = [torch.randn(shape) for shape in shapes]
    runner = built(f, given)
    assert runner.outside == []
    for threads in (1, 2, 3):
        with on_threads(threads):
            assert same_bits(runner(*given)[0], f(*given).contiguous())


def test_many_rows_of_a_mean() -> None:
    x = torch.randn(301, 450)
    runner = built(lambda a: aten.mean.dim(a, [-1], True), (x,))
    with on_threads(1):
        (alone,) = runner(x)
    with on_threads(2):
        assert same_bits(runner(x)[0], alone)
    assert torch.allclose(alone, x.mean(-1, keepdim=True), atol=1e-6)


@pytest.mark.parametrize("bits", [(8, 8), (8, 4), (4, 4)])
def test_many_tokens_that_a_cache_is_written(bits: tuple[int, int]) -> None:
    heads, tokens, d = 5, 150, 64
    k, v = torch.randn(1, heads, tokens, d), torch.randn(1, heads, tokens, d)
    at = torch.arange(3, 3 + tokens)
    empty = kv_empty(1, heads, 192, d, *bits)

    def f(k: Any, v: Any, at: Any, *cache: Any) -> Any:
        ops.kv_write.default(*cache, k, v, at)
        return aten.neg.default(k)

    def written(run: Callable[..., Any], threads: int) -> list[Tensor]:
        cache = [part.clone() for part in empty]
        with on_threads(threads):
            run(k, v, at, *cache)
        return cache

    class Of(torch.nn.Module):
        def forward(self, k: Any, v: Any, at: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
            return f(k, v, at, a, b, c, d)

    runner = built(Of(), (k, v, at, *empty))
    expected = written(f, 1)
    for threads in (1, 2, 3):
        assert all(map(same_bits, written(runner, threads), expected))
