"""Loading pickles of a `qfx.nn.Linear` that earlier versions wrote, whose codes were buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from qfx.host.subclasses import as_parameter
from qfx.nn.frozen_state import TENSORS, FrozenState
from qfx.nn.weight_parts import weight_of


def from_legacy_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the attributes of a module, from the state that an earlier version of qfx pickled.

    That state has an attribute `scheme` and the tensors as buffers. In the oldest pickles the
    buffer with the codes is called `packed`.
    """
    made, buffers = dict(state), dict(state["_buffers"])
    if "codes" not in buffers:
        buffers["codes"] = buffers.pop("packed")
    found = {name: buffers.pop(name, None) for name in TENSORS}
    buffers.pop("packed", None)
    tensors = {name: tensor for name, tensor in found.items() if tensor is not None}
    n, k = made["out_features"], made["in_features"]
    weight = weight_of(FrozenState(made.pop("scheme"), tensors), n, k, torch.float32)
    own = {"weight": as_parameter(weight), **made["_parameters"]}
    return made | {"_parameters": own, "_buffers": buffers}
