"""Which linears of a model are replaced, and replacing them in place under every name they have."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from qfx.config import Config
from qfx.nn.loading import FLOATS, check_first
from qfx.patterns import check_names, fits


def chosen(model: nn.Module, config: Config, who: str) -> dict[str, nn.Linear]:
    """Name -> linear, as `config.skip` and `config.only` say; a shared module has several names.

    Only exact `nn.Linear` modules count: subclasses, parametrized ones and the projections of
    nn.MultiheadAttention are read by other code than their own forward. Raises ValueError, in the
    name of `who`, for a pattern that fits none, and where there is no linear at all.
    """
    modules = model.named_modules(remove_duplicate=False)
    linears = {n: m for n, m in modules if type(m) is nn.Linear and n}
    check_names(config, linears)
    if not linears:
        raise ValueError(f"{who}: the model has no nn.Linear inside it")
    return {
        name: module
        for name, module in linears.items()
        if module.weight.dtype in FLOATS
        and not any(fits(p, [name]) for p in config.skip)
        and (not config.only or any(fits(p, [name]) for p in config.only))
    }


def replace(model: nn.Module, made: Mapping[str, nn.Module]) -> nn.Module:
    """Puts each module in the place of its name and returns the model, which from then on checks
    a state dict before it takes anything from it."""
    parents = set()
    for name, module in made.items():
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], module)
        parents.add(parent)
    _leave_fast_paths(model, parents)
    if made:
        check_first(model)
    return model


def _leave_fast_paths(model: nn.Module, parents: set[nn.Module]) -> None:
    """torch.nn's encoders would read the weights of their linears themselves, in float."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and module in parents:
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder) and not parents.isdisjoint(module.layers):
            module.use_nested_tensor = False
