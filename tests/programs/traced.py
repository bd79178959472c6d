"""Graphs for the tests of programs: traced from functions that call aten and qfx operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from qfx.programs import Runner, build

aten = torch.ops.aten


def built(f: Callable[..., Any], inputs: Sequence[Tensor]) -> Runner:
    """The program of a function of these inputs. Tensors that it closes over are constants."""
    return build(fx.symbolic_trace(f), inputs)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, but for what a NaN says and the sign of zero."""
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.isnan(), b.isnan())
        and bool(((a == b) | a.isnan()).all())
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )
