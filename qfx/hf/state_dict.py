"""The state dict that a transformers model is saved with.

For each int8 linear it contains, in addition to the int8 or 1-bit weight, a tensor `weight`, int8
[N], without information. A transformers that does not know qfx ignores the quantization with a
warning and would fill the linears with random weights. With this tensor it finds a `weight` of an
unexpected shape and stops.
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
            state[key] = state[key].clone()  # otherwise a shared linear is saved under one name
        state[f"{name}.{MARK}"] = torch.zeros(linear.out_features, dtype=torch.int8, device="cpu")
    return state


def scheme_numbers(
    model: nn.Module, known: dict[StoredModule, list[int]] | None = None
) -> dict[str, list[int]]:
    """Returns, by name, the numbers that describe the scheme of each int8 linear in config.json,
    without trailing zeros.

    `known`: the numbers of linears that were computed before, for example for an inner model; new
    ones are added to it.
    """
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
