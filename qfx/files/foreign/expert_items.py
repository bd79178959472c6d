"""Products of experts in models of other tools: their tensors, put together as `qfx.nn.Experts` has
them.

A tool stores the gate and the other half of the first product apart, and may store each expert
apart. The rows of all of them together are the rows of one weight.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qfx.files.expert_blocks import products_in
from qfx.files.foreign.item import Item
from qfx.files.foreign.weight import ForeignWeight
from qfx.files.tensor_file import on_own_pages
from qfx.io.errors import UserError, printable
from qfx.nn.experts_like import gate_of, why_not_experts

_ROLES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_MIXTRAL = re.compile(r"(\.experts\.\d+\.)(w[123])\.")


def parts_of_experts(skeleton: nn.Module) -> dict[str, tuple[str, ...]]:
    """Returns, by the name of a parameter with the weights of experts, the names under which other
    tools store the parts of each expert's weight, in the order of their rows. Leaves out blocks of
    which other tools are not known to have such parts."""
    found = {}
    for name, product in products_in(skeleton).items():
        block, _, role = name.rpartition(".")
        gate = None if why_not_experts(product.module) else gate_of(product.module)
        if gate is None or gate.gate == "interleaved" or product.is_transposed:
            continue
        halves = ("gate_proj", "up_proj") if gate.gate == "halves" else ("up_proj",)
        parts = halves if role == "up" else ("down_proj",)
        found[f"{block}.{product.name}"] = tuple(f"{block}.{part}" for part in parts)
    return found


def joined(parts: Sequence[Item], name: str, at: str) -> Item:
    """Returns the item of a product [E, N, K] with the rows of the `parts` [E, J, K] of each
    expert. `name`: that of the product; `at`: that of the file. Raises UserError if the parts
    differ."""
    first = parts[0]
    for part in parts[1:]:
        if _alike(part) != _alike(first):
            raise UserError(
                f"{at}: the parts of {printable(name)} differ: {_text(first)} and {_text(part)}"
            )
    e, _, k = first.shape

    def each() -> Iterator[Tensor]:
        for experts in zip(*(part.experts() for part in parts), strict=True):
            yield torch.cat(experts)

    def weight() -> ForeignWeight:
        return _together([part.integers() for part in parts], e)

    rows = sum(part.shape[1] for part in parts)
    whole = first._replace(shape=(e, rows, k), each=each, weight=weight if first.grid else None)
    return whole._replace(floats=lambda: _whole(whole))


def _alike(item: Item) -> tuple[Any, ...]:
    """Returns what items must have in common to be parts of one weight."""
    return item.dtype, item.shape[0], item.shape[2], item.kind, item.grid, item.x


def _text(item: Item) -> str:
    return f"{item.kind or item.dtype} {list(item.shape)}"


def stacked(experts: Sequence[Item], name: str, at: str) -> Item:
    """Returns the item of a product [E, J, K] of linears [J, K]. Raises the errors of `joined`."""
    rows = joined([_of_one(item) for item in experts], name, at)
    shape = len(experts), *experts[0].shape
    if rows.shape[1] != shape[0] * shape[1]:
        raise UserError(f"{at}: the experts of {printable(name)} do not have the same shape")

    def each() -> Iterator[Tensor]:
        return (item.floats() for item in experts)

    whole = rows._replace(shape=shape, each=each)
    return whole._replace(floats=lambda: _whole(whole))


def _of_one(item: Item) -> Item:
    return item._replace(shape=(1, *item.shape), each=lambda: iter([item.floats()]))


def with_products(items: Mapping[str, Item], skeleton: nn.Module, at: str) -> dict[str, Item]:
    """Returns the items of a model whose experts are linears, with those of each product of the
    skeleton's experts put together, under the name of its parameter. Raises UserError for experts
    that differ or are missing."""
    wanted = skeleton.state_dict()
    found = {name if name in wanted else _spelled(name): item for name, item in items.items()}
    for name, parts in parts_of_experts(skeleton).items():
        if name in found:
            continue
        each = [_experts_of(found, part, name, at) for part in parts]
        if any(each):
            halves = [stacked(experts, name, at) for experts in each if experts]
            if len(halves) < len(parts):
                raise UserError(f"{at} lacks a part of the experts of {printable(name)}")
            found[name] = joined(halves, name, at)
    return found


def _spelled(name: str) -> str:
    """Returns the name of a tensor of a Mixtral as transformers 5 spells it."""
    renamed = name.replace(".block_sparse_moe.", ".mlp.")
    return _MIXTRAL.sub(lambda m: f"{m[1]}{_ROLES[m[2]]}.", renamed)


def _experts_of(found: dict[str, Item], part: str, name: str, at: str) -> list[Item]:
    """Takes the weights of all experts of one part out of the items, in the order of their
    numbers."""
    block, _, role = part.rpartition(".")
    numbered = re.compile(rf"{re.escape(block)}\.(\d{{1,9}})\.{role}\.weight")
    names = {int(match[1]): n for n in found if (match := numbered.fullmatch(n))}
    if {*names} != {*range(len(names))}:
        absent = min({*range(max(names))} - {*names})
        raise UserError(f"{at} lacks the expert {absent} of {printable(name)}")
    return [found.pop(names[e]) for e in range(len(names))]


def _whole(item: Item) -> Tensor:
    """Returns the float weights of all experts."""
    found = on_own_pages(item.shape, item.dtype)
    for e, one in enumerate(item.experts()):
        found[e] = one
    return found


def _together(parts: Sequence[ForeignWeight], e: int) -> ForeignWeight:
    """Returns one weight with the rows of all parts of an expert, then those of the next."""
    if len(parts) == 1:
        return parts[0]
    fields: list[Any] = []
    for each in zip(*parts, strict=True):
        if not isinstance(each[0], Tensor):
            fields.append(each[0])
            continue
        by_expert = [t.reshape(e, -1, t.shape[-1]) for t in each]
        rows = sum(t.shape[1] for t in by_expert)
        made = on_own_pages((e, rows, each[0].shape[-1]), each[0].dtype)
        fields.append(torch.cat(by_expert, 1, out=made).reshape(e * rows, -1))
    return ForeignWeight(*fields)
