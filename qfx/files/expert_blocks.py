"""Blocks of experts of a skeleton. Files store each as two weights, `up` and `down`, with the
experts as first dimension, in the place of two parameters of the skeleton."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from qfx.io.errors import UserError, printable
from qfx.nn.experts import Experts
from qfx.nn.experts_like import FloatProduct, gate_of, is_experts, products_of, why_not_experts
from qfx.nn.stacked_weight import StackedWeight

UP, DOWN = "up", "down"  # the names that the products have in `qfx.nn.Experts`


def products_in(skeleton: nn.Module) -> dict[str, FloatProduct]:
    """Returns the products of all float experts inside the skeleton, by the names that they have in
    files."""
    found: dict[str, FloatProduct] = {}
    for name, module in skeleton.named_modules(remove_duplicate=False):
        if name and is_experts(module):
            up, down = products_of(module)
            found |= {f"{name}.{UP}": up, f"{name}.{DOWN}": down}
    return found


def renamed(state: Mapping[str, Any], taken: Mapping[str, FloatProduct]) -> dict[str, Any]:
    """Returns the state dict of a skeleton, in which the products that are `taken` from files have
    the names of linears: `weight` and `bias` below the name of the product."""
    to: dict[str, str] = {}
    for name, product in taken.items():
        prefix = f"{name.rpartition('.')[0]}.{product.name}"
        to |= {prefix: f"{name}.weight", f"{prefix}_bias": f"{name}.bias"}
    return {to.get(name, name): value for name, value in state.items()}


def blocks_of(taken: Iterable[str], skeleton: nn.Module, at: str) -> dict[str, nn.Module]:
    """Returns the blocks of experts of the products `taken`, by name. Raises UserError, with the
    name `at` of the file, if one of two products is missing, or a block has no int8 form."""
    names, found = {*taken}, {}
    for block in dict.fromkeys(name.rpartition(".")[0] for name in names):
        here = f"{at}: {printable(block)}"
        if absent := {f"{block}.{UP}", f"{block}.{DOWN}"} - names:
            raise UserError(f"{here} has experts in int8, and no codes of {printable(min(absent))}")
        found[block] = skeleton.get_submodule(block)
        if why := why_not_experts(found[block]):
            raise UserError(f"{here} is int8, and in the skeleton {why}")
    return found


def experts_from(
    blocks: Mapping[str, nn.Module],
    made: Mapping[str, nn.Module],
    stored_by: Callable[[str], str],
) -> dict[str, Experts]:
    """Returns the int8 experts that replace the blocks, by name. `made`: their products, by the
    names under which these are stored, which `stored_by` returns. A block that is stored once
    becomes one module."""
    each: dict[str, Experts] = {}
    found = {}
    for name, block in blocks.items():
        first = stored_by(f"{name}.{UP}")
        if first not in each:
            up, down = made[first], made[stored_by(f"{name}.{DOWN}")]
            assert isinstance(up, StackedWeight) and isinstance(down, StackedWeight)
            each[first] = put_together(block, up, down)
        found[name] = each[first]
    return found


def put_together(block: nn.Module, up: StackedWeight, down: StackedWeight) -> Experts:
    """Returns int8 experts of two products, with the gate of the float experts `block`."""
    gate = gate_of(block)
    assert gate is not None  # `why_not_experts` has tried it
    return Experts(up, down, gate).train(block.training)
