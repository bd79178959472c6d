"""What a model of transformers is saved as: its state dict, and beside the codes of each int8
linear, or its signs, `weight`, int8 [N], which holds nothing.

A transformers that does not know qfx leaves out the quantization, with a warning, and would fill
the linears with random weights. It finds `weight` of another shape than it expects, and stops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qfx.hf.placeholder import MARK
from qfx.nn.loading import StoredModule
from qfx.nn.scheme_tensor import LENGTH
from qfx.nn.stored_modules import stored_linears


def marked_state(model: nn.Module) -> dict[str, Tensor]:
    state = dict(model.state_dict())
    for name, linear in stored_linears(model):
        for key in [key for key in state if key.startswith(f"{name}.")]:
            state[key] = state[key].clone()  # else a linear under two names is saved under one
        state[f"{name}.{MARK}"] = torch.zeros(linear.out_features, dtype=torch.int8, device="cpu")
    return state


def scheme_numbers(
    model: nn.Module, known: dict[StoredModule, list[int]] | None = None
) -> dict[str, list[int]]:
    """For config.json: by name, the numbers of its scheme without the zeros behind them. `known`:
    those of linears that were asked before, as of a model inside; others are added."""
    known = {} if known is None else known
    linears = dict(stored_linears(model))
    for linear in linears.values():
        if linear not in known:
            known[linear] = _numbers(linear)
    return {name: known[linear] for name, linear in linears.items()}


def _numbers(linear: StoredModule) -> list[int]:
    state: Any = linear.saved_scheme().tolist()
    assert len(state) == LENGTH
    return state[: max(i for i, number in enumerate(state, 1) if number)]  # type: ignore[no-any-return]
