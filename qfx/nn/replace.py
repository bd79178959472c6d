"""Replaces linears by new modules under all of their names, and logs the result for each linear."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from qfx.nn.experts_like import is_experts, shape_text
from qfx.nn.hook_transfer import transfer_hooks
from qfx.nn.left_float import note_left_float
from qfx.nn.linear_like import sizes_of
from qfx.nn.loading import check_first
from qfx.nn.recurrent_like import is_recurrent
from qfx.nn.recurrent_like import shape_text as recurrent_shape
from qfx.nn.routers import routers
from qfx.nn.selection import Selection
from qfx.nn.summary import LinearSummary, Summary, bytes_of, report
from qfx.nn.weight_bytes import weight_bytes


def replace(chosen: Selection, made: Mapping[str, nn.Module]) -> nn.Module:
    """Replaces modules of the chosen model by the new modules `made`, by name, and returns the
    model.

    Transfers what users added to the old modules, logs the result for each linear, and makes the
    model check a whole state dict before it loads any of it.
    """
    model = chosen.model
    before, parents = bytes_of(model), set()
    blocks = {n: [*routers(model, n)] for n in made if is_experts(model.get_submodule(n))}
    for name, module in made.items():
        parent, last = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        if getattr(parent, last) is not module:  # the parent may also have several names
            transfer_hooks(getattr(parent, last), module)
            setattr(parent, last, module)
        parents.add(parent)
    _leave_fast_paths(model, parents)
    each = chosen.linears.items()
    lines = tuple(_line(name, linear, chosen, made, blocks.get(name)) for name, linear in each)
    sizes = before, bytes_of(model)
    note_left_float(chosen.linears, {**chosen.missed, **chosen.left})
    report(Summary(chosen.who, lines, *sizes, weight_bytes(model), chosen.what), chosen)
    if made:
        check_first(model)
    return model


def _line(
    name: str,
    linear: nn.Module,
    chosen: Selection,
    made: Mapping[str, nn.Module],
    routers_of: Sequence[str] | None,
) -> LinearSummary:
    """Returns the row of one module. `routers_of`: the names of the routers of experts."""
    shape = _shape(linear)
    if name not in made:
        return LinearSummary(name, shape, "float", chosen.left.get(name, "") or chosen.missed[name])
    module = made[name]
    if routers_of is not None:
        float_ = f"{', '.join(routers_of)} stays float" if routers_of else ""
        return LinearSummary(name, shape, f"{type(module).__name__} {module.scheme}", float_)
    shape = f"{module.in_features}x{module.out_features}"  # the attributes may be outdated
    return LinearSummary(
        name, shape, f"{type(module).__name__} {getattr(module, 'scheme', '1 bit')}", ""
    )


def _shape(linear: nn.Module) -> str:
    if is_recurrent(linear):
        return recurrent_shape(linear)
    return shape_text(linear) if is_experts(linear) else "x".join(map(str, sizes_of(linear)))


def _leave_fast_paths(model: nn.Module, parents: set[nn.Module]) -> None:
    """Disables the fast paths of torch.nn's encoders, which would read the weights of their linears
    in float."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and module in parents:
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder) and not parents.isdisjoint(module.layers):
            module.use_nested_tensor = False
