"""Recurrent layers outside of graphs: whether Dynamo shall capture the nn.LSTM and nn.GRU of a
model, and a warning if it does not.

Dynamo leaves them out by default. Inductor would unroll the steps of a layer that stays float, so
they are captured only where each of them becomes the operator lstm or gru.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from weakref import WeakSet

import torch
from torch import nn

from qfx.graph.recurrent_bodies import FLOATS
from qfx.host.dynamo import captures_recurrent
from qfx.host.frame import place
from qfx.match.recurrent import why_all_stay, why_no_steps
from qfx.nn.recurrent import Recurrent
from qfx.values.config import Config
from qfx.values.limits import why_few_features
from qfx.values.select import left_out

_WARNED: WeakSet[nn.Module] = WeakSet()  # layers that were warned of


def recurrent_layers(modules: Sequence[nn.Module]) -> list[nn.RNNBase]:
    """Returns the recurrent layers inside `modules`, each once."""
    inside = {id(m): m for top in modules for m in top.modules() if isinstance(m, nn.RNNBase)}
    return [*inside.values()]


def become_int8(layers: Sequence[nn.RNNBase], modules: Sequence[nn.Module], config: Config) -> bool:
    """Whether each of the `layers` of `modules` has an int8 operator, for inputs of its own data
    type, in a graph that is captured now."""
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or why_all_stay(config):
        return False
    return all(next(_reasons(layer, modules, config), None) is None for layer in layers)


def _reasons(layer: nn.RNNBase, modules: Sequence[nn.Module], config: Config) -> Iterator[str]:
    """Yields why a layer stays float, or why its inputs and weights cannot be known here."""
    if layer.mode not in ("LSTM", "GRU") or layer.proj_size:
        yield "it has no operator"
    kinds = ("weight", "bias") if layer.bias else ("weight",)
    names = [f"{kind}_{name}" for name in Recurrent.linear_names(layer) for kind in kinds]
    if not all(layer._parameters.get(name) is not None for name in names):
        yield "its weights are computed"
        return
    params = [layer._parameters[name] for name in names]
    if any(p.device.type != "cpu" or p.dtype not in FLOATS for p in params if p is not None):
        yield "its steps have no kernel on this device or for this data type"
    path = place(layer, modules)[1]
    if why := left_out(config, [path, *(f"{path}.{name}" for name in names)]):
        yield why
    if why := why_no_steps(config.chosen) or why_few_features(layer.hidden_size):
        yield why


def warning_outside(layers: Sequence[nn.RNNBase]) -> str | None:
    """Returns the text of a warning about layers that Dynamo leaves out of graphs; None if there
    are none, if Dynamo captures them, and if the text was already returned for each of them."""
    new = [layer for layer in layers if layer not in _WARNED]
    if not new or captures_recurrent():
        return None
    _WARNED.update(new)
    found = sorted({f"nn.{type(layer).__name__}" for layer in new})
    return (
        f"qfx: Dynamo leaves {' and '.join(found)} out of graphs, so that they stay float, and "
        "often the function that calls them too. nn.LSTM and nn.GRU become int8 in graphs under "
        "torch.no_grad(), and everywhere by qfx.quantize_(model) before torch.compile"
    )


def forget() -> None:
    """Clears the record of warnings when `torch._dynamo.reset()` is called."""
    _WARNED.clear()
