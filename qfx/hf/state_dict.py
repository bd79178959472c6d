"""The state dict that a transformers model is saved with.

For each int8 linear it contains, in addition to the int8 or 1-bit weight, a tensor `weight`, int8
[N], without information. A transformers that does not know qfx ignores the quantization with a
warning and would fill the linears with random weights. With this tensor it finds a `weight` of an
unexpected shape and stops. For int8 experts there are such tensors by the names of the float
weights. transformers may save each expert under a name of its own, so they are those of one expert,
whose features are an even number because a gate may be split off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qfx.hf.placeholder import MARK, MARK_OF_EXPERTS
from qfx.nn.experts import Experts
from qfx.nn.scheme_tensor import LENGTH
from qfx.nn.stored_modules import Stored, stored_linears, stored_weights


def marked_state(model: nn.Module) -> dict[str, Tensor]:
    state = dict(model.state_dict())
    for name, linear in stored_linears(model):
        for key in [key for key in state if key.startswith(f"{name}.")]:
            state[key] = state[key].clone()  # otherwise a shared linear is saved under one name
        state[f"{name}.{MARK}"] = torch.zeros(linear.out_features, dtype=torch.int8, device="cpu")
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Experts):
            state |= _marks(module, f"{name}.", state)
    return state


def _marks(experts: Experts, prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    up = "up_proj" if experts.gate.gate == "none" else "gate_up_proj"
    found = {
        prefix + name: torch.zeros(MARK_OF_EXPERTS, dtype=torch.int8, device="cpu")
        for name in (up, "down_proj")
    }
    biases = [f"{prefix}{part}.bias" for part in ("up", "down")]
    return found | {name: state[name].clone() for name in biases if name in state}


def scheme_numbers(
    model: nn.Module, known: dict[Stored, list[int]] | None = None
) -> dict[str, list[int]]:
    """Returns, by name, the numbers that describe the scheme of each int8 linear, and of each
    product of int8 experts, in config.json, without trailing zeros.

    `known`: the numbers of linears that were computed before, for example for an inner model; new
    ones are added to it.
    """
    known = {} if known is None else known
    linears = dict(stored_weights(model))
    for linear in linears.values():
        if linear not in known:
            known[linear] = _numbers(linear)
    return {name: known[linear] for name, linear in linears.items()}


def _numbers(linear: Stored) -> list[int]:
    state: Any = linear.saved_scheme().tolist()
    assert len(state) == LENGTH
    return state[: max(i for i, number in enumerate(state, 1) if number)]  # type: ignore[no-any-return]
