"""quantize_: the linears of a model become int8 modules, in place."""

from __future__ import annotations

from dataclasses import replace as changed

from torch import nn

from qfx.config import Config
from qfx.nn.linear import Linear
from qfx.nn.replace import chosen, replace
from qfx.recipe import SiteRecipe
from qfx.scheme import Scheme


def quantize_(model: nn.Module, config: Config | None = None) -> nn.Module:
    """Replaces the nn.Linear modules of `model` in place by `qfx.nn.Linear` and returns the model.

    The float weights are freed, unless something else refers to them, as a tied embedding does.
    `config`: `scheme` (a `Scheme`, or the first of a preset), `recipe`, `skip` and `only` (patterns
    of module names) and `backward`; no cost is predicted, since the number of tokens is not known.
    Linears of other float types stay. Raises ValueError for a pattern or recipe that does not fit
    the model, and for a model without linears inside it.
    """
    config = config or Config()
    linears = chosen(model, config, "quantize_")
    decided = {name: _decided(config, name) for name in linears}
    each: dict[nn.Linear, Linear] = {}
    for name, linear in linears.items():
        how = decided[name]
        if how is not None and linear not in each:
            each[linear] = Linear.from_float(linear, how)
    return replace(model, {name: each[m] for name, m in linears.items() if m in each})


def _decided(config: Config, name: str) -> Scheme | SiteRecipe | None:
    """How the linear of this name is quantized; None where the recipe leaves it float."""
    sites = [s for s in config.recipe.sites if s.name == name] if config.recipe else []
    if not sites:
        return config.chosen
    if len({changed(s, call=0, sqnr_db=None, reason="") for s in sites}) > 1:
        raise ValueError(
            f"quantize_: the recipe decides differently on the {len(sites)} calls of {name}, but a "
            "module has one scheme; give the recipe to torch.compile, or skip this module"
        )
    return sites[0] if sites[0].scheme else None
