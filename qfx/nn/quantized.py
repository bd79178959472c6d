"""quantize_: the linears of a model become int8 modules, in place."""

from __future__ import annotations

from torch import nn

from qfx.config import Config
from qfx.nn.linear import Linear
from qfx.nn.replace import chosen, replace


def quantize_(model: nn.Module, config: Config | None = None) -> nn.Module:
    """Replaces the nn.Linear modules of `model` in place by `qfx.nn.Linear` and returns the model.

    The float weights are freed, unless something else refers to them, as a tied embedding does.
    `config`: `scheme` (a `Scheme`, or the first of a preset), `skip` and `only` (patterns of module
    names) and `backward`; no cost is predicted, since the number of tokens is not known. float64
    linears stay. Raises ValueError for a pattern that fits nothing and a model without linears.
    """
    config = config or Config()
    linears = chosen(model, config, "quantize_")
    each = {m: Linear.from_float(m, config.schemes[0]) for m in linears.values()}
    return replace(model, {name: each[m] for name, m in linears.items()})
