"""A training step of a small model: its gradients, and comparisons of two sets of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qfx.ops.single_tensors import sqnr

WORDS, FEATURES = 32, 16
Gradients = dict[str, Tensor | None]
Function = Callable[..., Any]


class Language(nn.Module):
    """A model of next-word scores: a residual MLP after a norm, with the head tied to the
    embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, FEATURES), nn.LayerNorm(FEATURES)
        self.up, self.down = nn.Linear(FEATURES, 32), nn.Linear(32, FEATURES)
        self.head = nn.Linear(FEATURES, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        h = self.embed(words)
        h = h + self.down(F.gelu(self.up(self.norm(h))))
        return self.head(h)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


_data = torch.Generator().manual_seed(1)
BATCH = torch.randint(0, WORDS, (4, 8), generator=_data)
NEXT = torch.randint(0, WORDS, (4, 8), generator=_data)
X = torch.randn(6, 8, generator=_data)


def new(kind: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return kind()


def loss_of(f: Function, part: slice = slice(None), reduction: str = "mean") -> Tensor:
    return F.cross_entropy(
        f(BATCH[part]).flatten(0, 1).float(), NEXT[part].flatten(), reduction=reduction
    )


def collected(model: nn.Module) -> Gradients:
    found = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return found


def step(f: Function, model: nn.Module) -> Gradients:
    """Returns the gradients of one step of a Language."""
    loss_of(f).backward()
    return collected(model)


def _square(y: Tensor) -> Tensor:
    return y.square().sum()


def of_x_too(f: Function, model: nn.Module, loss: Function = _square, x: Tensor = X) -> Gradients:
    """Returns the gradients of a loss of f(x): those of the model and that of x."""
    x = x.detach().clone().requires_grad_()
    loss(f(x)).backward()
    return {"x": x.grad, **collected(model)}


def same(a: Gradients, b: Gradients) -> bool:
    """Whether two sets have gradients for the same tensors, with the same dtypes and bits."""
    pairs = [(a[name], b[name]) for name in a]
    return a.keys() == b.keys() and all(
        v is w is None or (v is not None and w is not None and v.dtype == w.dtype and v.equal(w))
        for v, w in pairs
    )


def near(expected: Gradients, found: Gradients, at_least: float = 25) -> bool:
    """Whether int8 gradients are for the same tensors and of the same dtypes as float ones, close
    but not equal."""
    for name, e in expected.items():
        d = found[name]
        if (e is None) != (d is None):
            raise AssertionError(f"gradient of {name}: float {e is not None}, int8 {d is not None}")
        if e is not None and d is not None:
            assert e.dtype == d.dtype and sqnr(e, d) > at_least, name
    return any(e is not None and not e.equal(found[n]) for n, e in expected.items())
