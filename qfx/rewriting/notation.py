"""The names of operators in the patterns of canonical and fused graphs."""

from __future__ import annotations

from typing import Any

import torch

from qfx.graph.patterns import Pattern, Template

ops = torch.ops.qfx
CODES = (ops.quantize.default, ops.linear_requantize.default)
INLINED = "qfx_inlined"  # metadata of aten nodes: which part of which quantization they compute
OF_MODEL = "qfx_match"  # metadata: the place in the plan of the match that a node computes
Notes = dict[int, list[str]]  # words about a match, by its place in the plan


class _Calls(dict[str, tuple[Any, ...]]):
    """A map from names to operators. A name without an entry is the name of an operator of qfx."""

    def __missing__(self, name: str) -> tuple[Any, ...]:
        return (getattr(ops, name).default,)


CALLS = _Calls(
    codes=CODES,
    transposed=(torch.ops.aten.mT,),
    to=(torch.ops.aten.to.dtype, torch.ops.aten.to),
)


def pattern(text: str, through: tuple[Any, ...] = (), **where: str) -> Pattern:
    return Pattern(text, CALLS, through, **where)


def template(text: str) -> Template:
    return Template(text, CALLS)
