"""Rows taken out of a table: as embeddings, for which a program has an instruction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qfx.programs import build

B, T, N, K = 2, 3, 11, 4


def _gathered(x: Tensor, i: Tensor) -> Tensor:
    return x.repeat(B, 1, 1).gather(1, i[:, :, None].repeat(1, 1, K))


# Of x [N, K] and i [B, T]: what one program gives, or else what PyTorch runs.
WAYS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str | None]] = {
    "index": (lambda x, i: x[i], None),
    "index_select": (lambda x, i: x.index_select(0, i.view(-1)).view(B, T, K), None),
    "gather": (_gathered, None),
    "shifted": (lambda x, i: nn.functional.embedding(i + 2, x), None),
    "shifted index": (lambda x, i: x[(i + 1).view(-1)], None),
    "another axis": (lambda x, i: x.index_select(1, i[0]), "aten.index_select.default"),
    "shifted back": (lambda x, i: nn.functional.embedding(i - 1, x), "aten.sub.Tensor"),
    "by a tensor": (lambda x, i: nn.functional.embedding(i + i, x), "aten.add.Tensor"),
}


class _Rows(nn.Module):
    def __init__(self, way: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.way = way
        self.x = nn.Parameter(torch.arange(N * K, dtype=torch.float32).view(N, K))

    def forward(self, i: Tensor) -> Tensor:
        return self.way(self.x, i)


@pytest.mark.parametrize("name", WAYS)
def test_rows(name: str) -> None:
    way, outside = WAYS[name]
    i = torch.tensor([[1, 2, 3], [3, 1, 2]])
    with torch.no_grad():
        exported: Any = torch.export.export(_Rows(way), (i,))
        runner = build(exported.module(), (i,))
        expected = exported.module()(i)
    assert set(runner.outside) == ({outside} if outside else set())
    assert torch.equal(runner(i)[0], expected)


@pytest.mark.parametrize("number", [-1, N - 2, N])
def test_numbers_outside_the_table_are_an_error(number: int) -> None:
    i = torch.ones(B, T, dtype=torch.int64)
    with torch.no_grad():
        exported: Any = torch.export.export(_Rows(WAYS["shifted"][0]), (i,))
        runner = build(exported.module(), (i,))
    with pytest.raises(IndexError, match=str(number)):
        runner(i * number)
