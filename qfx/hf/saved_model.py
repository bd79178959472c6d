"""Puts placeholders into a model for the int8 modules of a saved one, and the int8 modules in their
place when transformers has loaded their tensors."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from torch import nn

from qfx.files.expert_blocks import blocks_of, products_in
from qfx.hf.placeholder import MARK, ExpertsPlaceholder, Placeholder
from qfx.hf.tensor_parallel import LaterPlan
from qfx.io.errors import UserError, printable

WHO = "from_pretrained"
PLACEHOLDERS = (Placeholder, ExpertsPlaceholder)


def set_placeholders(model: Any, linears: Mapping[str, list[int]] | None) -> list[str]:
    """Replaces the modules that are int8 in the saved model by placeholders, and returns the names
    of these modules, and of products of experts, in `model`. `linears`: their schemes in
    config.json. Raises UserError if these do not fit the model."""
    if linears is None:
        raise UserError(
            f"{WHO}: the quantization_config of config.json does not say which linears are int8"
        )
    modules = dict(model.named_modules()) | products_in(model)
    prefix = f"{model.base_model_prefix}."
    names = {here: n for name, n in linears.items() if (here := _spelled(name, prefix, modules))}
    if not names:
        few = printable(", ".join([*linears][:3]))
        raise UserError(
            f"{WHO}: none of the {len(linears)} int8 linears of config.json ({few}, ...) is in "
            f"a {type(model).__name__}"
        )
    each = {name: Placeholder(modules[name], n, name) for name, n in names.items()}
    products = [n for n in names if not isinstance(modules[n], nn.Module)]
    blocks = blocks_of(products, model, f"{WHO}: config.json")
    for name, block in blocks.items():
        parts = (each.pop(f"{name}.{part}") for part in ("up", "down"))
        model.set_submodule(name, ExpertsPlaceholder(block, *parts))
    for name, module in each.items():
        model.set_submodule(name, module)
    return [*names]


def _spelled(name: str, prefix: str, names: Container[str]) -> str | None:
    """Returns that of `names` of a module called `name` in the saved model; None if there is none.
    One of the two models may have an output layer (a head) around the other: `prefix`."""
    spellings = (name, name.removeprefix(prefix), f"{prefix}{name}")
    return next((spelling for spelling in spellings if spelling in names), None)


def put_together(model: Any, parallel: LaterPlan) -> None:
    """Replaces all placeholders in `model` by int8 modules with the tensors that were loaded.
    Raises UserError, before it replaces one, for tensors that are missing or do not fit."""
    awaited = {name: m for name, m in model.named_modules() if isinstance(m, Placeholder)}
    blocks = {name: m for name, m in model.named_modules() if isinstance(m, ExpertsPlaceholder)}
    for name, block in blocks.items():
        parallel.refuse(block, name)
    states: dict[str, Any] = {}
    for name, module in awaited.items():
        try:
            states[name] = module.taken(name)
        except ValueError as why:
            raise UserError(f"{WHO}: {printable(str(why))}") from None
    for name, module in awaited.items():
        for part in (*module.wanted, MARK):
            module._buffers[part] = None  # frees the codes when they are packed
        made = module.made(states.pop(name))
        parallel.apply(module, made, name)
        model.set_submodule(name, made)
    for name, block in blocks.items():
        model.set_submodule(name, block.made())
