"""Warns if an optimizer trains the biases of int8 linears but no weights or adapters: int8 weights
do not train."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch import Tensor

from qfx.host.optimizers import before_each_step

if TYPE_CHECKING:
    from qfx.nn.linear_weight import LinearWeight

_KNOWN: WeakSet[LinearWeight] = WeakSet()
_SEEN: WeakSet[torch.optim.Optimizer] = WeakSet()


def watch(linear: LinearWeight) -> None:
    """Makes optimizers warn from now on, at a step that trains the bias of `linear` but no adapter.

    Each optimizer warns once, at its first step. An adapter is a pair of parameters [r, K] and [N,
    r] for a linear [N, K], with r less than N and K, as in LoRA and its variants.
    """
    if linear.bias is not None:
        _KNOWN.add(linear)


def _step(optimizer: torch.optim.Optimizer) -> None:
    if not _KNOWN or optimizer in _SEEN:
        return
    _SEEN.add(optimizer)
    groups = optimizer.param_groups
    trained = {id(p): p for group in groups for p in group["params"] if p.grad is not None}
    found = [linear for linear in list(_KNOWN) if id(linear.bias) in trained]
    if found and not _adapts(trained.values(), found):
        warnings.warn(
            f"qfx: {type(optimizer).__name__} trains the biases of {len(found)} int8 linears and "
            "not their weights, which are codes. Give it adapters (PEFT's LoRA takes int8 linears),"
            " train the float model in int8 (torch.compile(model, backend='qfx') or "
            "qfx.prepare_qat) and quantize it afterwards, leave linears float "
            "(qfx.Config(skip=[...])), or freeze the biases (bias.requires_grad_(False))",
            stacklevel=4,
        )


def _adapts(trained: Iterable[Tensor], linears: Iterable[LinearWeight]) -> bool:
    shapes = {tuple(p.shape) for p in trained if p.dim() == 2}
    sizes = {(linear.out_features, linear.in_features) for linear in linears}
    return any(
        columns == k and r < min(n, k) and (n, r) in shapes
        for n, k in sizes
        for r, columns in shapes
    )


before_each_step(_step)
