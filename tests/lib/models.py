"""Small models that the compiler tests share, and functions that compile them without touching
caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qfx
from qfx.ops.code import Code
from qfx.ops.layout import Layout

FEATURES = 32


class Block(nn.Module):
    """A model with attention whose q, k and v share an input, a gated MLP, and a head tied to the
    embedding."""

    def __init__(self, features: int = FEATURES) -> None:
        super().__init__()
        self.embed = nn.Embedding(features, features)
        self.q, self.k = nn.Linear(features, features), nn.Linear(features, features)
        self.v = nn.Linear(features, features, bias=False)
        self.norm = nn.LayerNorm(features)
        self.gate, self.up = nn.Linear(features, 2 * features), nn.Linear(features, 2 * features)
        self.down = nn.Parameter(torch.randn(2 * features, features) / features)
        self.lm_head = nn.Linear(features, features, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(-1, -2) / x.shape[-1] ** 0.5
        h = self.norm(x + F.softmax(scores, -1) @ self.v(x))
        h = h + (F.silu(self.gate(h)) * self.up(h)) @ self.down
        return self.lm_head(h)


class Applied(nn.Module):
    """A module that applies a function of one tensor."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def compiled(
    model: nn.Module, *, fullgraph: bool = False, dynamic: bool | None = None, **options: Any
) -> Any:
    """Compiles a model by `torch.compile` with qfx: everything legal in int8, one fixed scheme, no
    Inductor."""
    options = {"minimum_gain": 0, "scheme": "w8a8-asymmetric", "inner": "eager", **options}
    return torch.compile(
        model, backend=qfx.backend, fullgraph=fullgraph, dynamic=dynamic, options=options
    )


def int8_by_hand(x: Tensor, w_nk: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes x @ w_nk.T + bias by the references, with per-token asymmetric activations."""
    from qfx.ops import REFERENCES as ref

    q, scale, _ = ref["quantize"](w_nk.detach(), list(Code()))
    given = (ref["pack_weight"](q, scale), list(Layout(len(w_nk))), bias)
    return ref["linear_dynamic"](x, *given, list(Code(symmetric=0)), "none", x.dtype)
