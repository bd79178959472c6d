"""Emit: the instructions of one node. `EMIT` is the table of operators that programs support;
`pointwise`, `data_movement`, `linears`, `experts`, `routing`, `caches` and `attention` add rows to
it.

A function of the table takes an `Emitter` and the node and calls `emitter(name, ...)` for each
instruction. It raises `Outside` for cases that it does not support; then PyTorch runs the node.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from qfx.host.operators import OpOverload, schema
from qfx.host.tensors import storage_key
from qfx.programs.bytecode import (
    BINARY,
    ELEMENTS,
    MOST_AXES,
    OPERATIONS,
    UNARY,
    Instruction,
    Operand,
    contiguous_strides,
)
from qfx.programs.memory import Region, RegionKind


class Outside(Exception):
    """Raised for a node for which programs have no instruction."""


@dataclass
class NodeStep:
    """A node of a graph as part of a program. `instructions`: the instructions that compute the
    node; None if PyTorch runs the node. `results`: the pieces of memory (`Region`) that hold the
    results of the node. `regions`: all pieces of memory that the node reads or writes."""

    node: fx.Node
    instructions: list[Instruction] | None
    results: list[Region]
    regions: list[Region] = field(default_factory=list)


class Emitter:
    """Makes the operands of nodes, and collects the instructions of the current node."""

    def __init__(self, values: dict[fx.Node, Any], regions: dict[int, Region]) -> None:
        self.values, self.regions = values, regions
        self.made: list[Instruction] = []
        self.numbers: dict[str, Region] = {}  # by their text: 0.0 is not -0.0
        self.ends: dict[fx.Node, fx.Node] = {}  # a node -> the later node that it also computes

    def __call__(self, name: str, *parts: Any) -> None:
        self.made.append((OPERATIONS.index(name), *parts))

    def of(self, what: Any, dtype: torch.dtype | None = torch.float32) -> Operand:
        """Returns the operand of a node, or of a number as float32."""
        if isinstance(what, int | float):
            return self._number(float(what))
        return self.of_value(self.values[what], dtype)

    def of_value(self, value: Any, dtype: torch.dtype | None = torch.float32) -> Operand:
        """Returns the operand of a node's value, or of a part of it."""
        if not isinstance(value, Tensor) or value.ndim > MOST_AXES:
            raise Outside
        if dtype is not None and value.dtype != dtype:
            raise Outside
        if value.dtype not in ELEMENTS:
            raise Outside
        region = self.regions[storage_key(value)]
        begins = int(value.storage_offset()) if value.numel() else 0  # empty: anywhere
        offset = begins * value.element_size()
        return Operand(region, offset, value.dtype, tuple(value.shape), tuple(value.stride()))

    def whole(self, what: Any, dtype: torch.dtype | None = torch.float32) -> Operand:
        """Returns the operand of a node or number, copied if it is not contiguous."""
        source = self.of(what, dtype)
        if source.contiguous:
            return source
        return self.copied(source)

    def copied(self, source: Operand) -> Operand:
        fresh = self.fresh(source.sizes, source.dtype)
        self("copy", fresh, source)
        return fresh

    def fresh(self, sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> Operand:
        """Returns an operand in new memory that is used only within the current node."""
        region = Region(RegionKind.OWN, math.prod(sizes) * dtype.itemsize)
        return Operand(region, 0, dtype, tuple(sizes), contiguous_strides(sizes))

    def binary(self, name: str, out: Operand, a: Operand, b: Operand) -> Operand:
        sizes = out.sizes
        self("binary", BINARY.index(name), out, a.expanded(sizes), b.expanded(sizes))
        return out

    def unary(self, name: str, out: Operand, x: Operand) -> Operand:
        self("unary", UNARY.index(name), out, x.expanded(out.sizes))
        return out

    def _number(self, number: float) -> Operand:
        if repr(number) not in self.numbers:
            tensor = torch.tensor(number, dtype=torch.float32, device="cpu")
            self.numbers[repr(number)] = Region(RegionKind.NUMBER, 4, tensor)
        return Operand(self.numbers[repr(number)], 0, torch.float32, (), ())


Emit = Callable[[Emitter, fx.Node], None]
EMIT: dict[Any, Emit] = {}


def argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def written(node: fx.Node) -> list[fx.Node]:
    """Returns the arguments that a node may write to: all of them if no schema says which."""
    if node.target is operator.getitem:
        return []
    if not isinstance(node.target, OpOverload):
        return node.all_input_nodes
    found: list[fx.Node] = []
    for place, each in enumerate(schema(node.target).arguments):
        if each.alias_info is not None and each.alias_info.is_write:
            fx.map_arg(argument(node, place, each.name), found.append)
    return found


def unchanged(e: Emitter, value: fx.Node, since: fx.Node, until: fx.Node) -> bool:
    """Whether no node between two others writes to the memory of a value, so that what read it at
    the first may as well read it at the second."""
    memory, node = storage_key(e.values[value]), since.next
    while node is not until:
        if any(storage_key(e.values[each]) == memory for each in written(node)):
            return False
        node = node.next
    return True
