"""Replace: modules in the place of linears, under every name they have, and what became of each."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from qfx.nn.hook_transfer import transfer_hooks
from qfx.nn.left_float import note_left_float
from qfx.nn.linear_like import sizes_of
from qfx.nn.loading import check_first
from qfx.nn.selection import Selection
from qfx.nn.summary import LinearSummary, Summary, bytes_of, tell
from qfx.nn.weight_bytes import weight_bytes


def replace(chosen: Selection, made: Mapping[str, nn.Module]) -> nn.Module:
    """Puts each module in the place of its name, with what users gave the linear there, tells what
    became of each linear, and returns the model, which from then on checks a state dict before it
    takes anything from it."""
    model = chosen.model
    before, parents = bytes_of(model), set()
    for name, module in made.items():
        parent, last = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        if getattr(parent, last) is not module:  # the parent may have several names, too
            transfer_hooks(getattr(parent, last), module)
            setattr(parent, last, module)
        parents.add(parent)
    _leave_fast_paths(model, parents)
    lines = tuple(_line(name, linear, chosen, made) for name, linear in chosen.linears.items())
    sizes = before, bytes_of(model)
    note_left_float(chosen.linears, {**chosen.missed, **chosen.left})
    tell(Summary(chosen.who, lines, *sizes, weight_bytes(model), chosen.what), chosen)
    if made:
        check_first(model)
    return model


def _line(
    name: str, linear: nn.Module, chosen: Selection, made: Mapping[str, nn.Module]
) -> LinearSummary:
    k, n = sizes_of(linear)
    shape = f"{k}x{n}"
    if name not in made:
        return LinearSummary(name, shape, "float", chosen.left.get(name, "") or chosen.missed[name])
    module = made[name]
    shape = f"{module.in_features}x{module.out_features}"  # of the weight, not of old attributes
    return LinearSummary(
        name, shape, f"{type(module).__name__} {getattr(module, 'scheme', '1 bit')}", ""
    )


def _leave_fast_paths(model: nn.Module, parents: set[nn.Module]) -> None:
    """torch.nn's encoders would read the weights of their linears themselves, in float."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and module in parents:
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder) and not parents.isdisjoint(module.layers):
            module.use_nested_tensor = False
