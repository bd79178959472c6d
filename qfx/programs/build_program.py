"""Build: turns a rewritten graph into a Runner for inputs of fixed shapes.

The nodes are taken in order. Those that `EMIT` knows become instructions, and successive ones form
one program; PyTorch runs the other nodes between programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

import qfx.programs.attention
import qfx.programs.caches
import qfx.programs.data_movement
import qfx.programs.experts
import qfx.programs.linears
import qfx.programs.pointwise
import qfx.programs.routing  # noqa: F401  (rows of the table)
from qfx._C import Program
from qfx.graph.capture import clone
from qfx.host.operators import OpOverload
from qfx.host.tensors import storage_key, tree_leaves
from qfx.programs.bytecode import Instruction, Operand, encode
from qfx.programs.constant_index import slice_constant_indices
from qfx.programs.emit import EMIT, Emitter, NodeStep, Outside, written
from qfx.programs.executor import Part, Run, Runner, TorchCall
from qfx.programs.inputs import View
from qfx.programs.known_values import fold
from qfx.programs.lookups import as_embeddings
from qfx.programs.memory import Region, RegionKind, lay_out
from qfx.programs.shapes import Shapes

_CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size", "_assert")


def build(gm: fx.GraphModule, inputs: Sequence[Any]) -> Runner:
    """Returns the Runner of a graph.

    `gm`: a graph of operators of aten and qfx, as `qfx.rewrite` makes it from an exported graph; it
    is not changed. `inputs`: values of its placeholders; the runner works only for their sizes and
    strides.
    """
    _check(gm, inputs)
    return _Builder(_without_checks(gm), inputs).runner()


def _check(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    count = sum(node.op == "placeholder" for node in gm.graph.nodes)
    if len(inputs) != count:
        raise TypeError(f"{len(inputs)} inputs, expected {count}, as many as the graph has")
    for number, value in enumerate(inputs):
        if not isinstance(value, Tensor):
            raise TypeError(f"input {number} is a {type(value).__name__}, expected a tensor")
    for node in gm.graph.nodes:
        if isinstance(node.target, OpOverload) and torch.Tag.inplace_view in node.target.tags:
            raise NotImplementedError(
                f"{node} changes the shape of a tensor in place ({node.target}): a program knows "
                "the shapes of all tensors when it is made. Export the model first"
            )


def _without_checks(gm: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of the graph without checks that the runner makes itself and without inactive
    dropout, in which operators that programs do not have are replaced by others."""
    copy = clone(gm)
    for node in reversed(list(copy.graph.nodes)):
        guards = node.op == "call_module" and node.target == "_guards_fn"
        name = getattr(node.target, "__name__", "").partition(".")[0]
        if name == "dropout" and node.op == "call_function" and node.args[2] is False:
            node.replace_all_uses_with(node.args[0])
            copy.graph.erase_node(node)
        elif not node.users and (guards or name in _CHECKS):
            copy.graph.erase_node(node)
    slice_constant_indices(copy)
    fold(copy)
    as_embeddings(copy)
    copy.recompile()
    return copy


class _Builder:
    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.gm = gm
        self.shapes = Shapes(gm, inputs)
        self.values = self.shapes.of
        self.regions: dict[int, Region] = {}
        self.placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        for node, value in self.values.items():
            for tensor in _tensors(value):
                self._add_region(node, tensor)
        self.emitter = Emitter(self.values, self.regions)
        (self.output,) = (n for n in gm.graph.nodes if n.op == "output")
        for node in self.output.all_input_nodes:
            _become(self._regions(node), RegionKind.RESULT)

    def _add_region(self, node: fx.Node, value: Tensor) -> None:
        key = storage_key(value)
        if key in self.regions:
            return
        constant = self.shapes.constants.get(key)
        if (value if constant is None else constant).device.type != "cpu":
            raise NotImplementedError(f"{node} is on {value.device}: programs run on the CPU")
        if constant is not None:  # all of the constant's memory, not only this node's
            self.regions[key] = Region(
                RegionKind.CONSTANT, constant.untyped_storage().nbytes(), constant
            )
            return
        kind = RegionKind.INPUT if node.op == "placeholder" else RegionKind.OWN
        self.regions[key] = Region(kind, value.untyped_storage().nbytes())

    def _regions(self, node: fx.Node) -> list[Region]:
        """Returns the regions that hold the node's results."""
        return [self.regions[storage_key(t)] for t in _tensors(self.values[node])]

    # --- nodes to steps ---

    def runner(self) -> Runner:
        steps = self._needed([s for n in self.gm.graph.nodes for s in self._steps(n)])
        for number, step in enumerate(steps):
            for region in step.regions:
                region.used_at(number)
            if step.instructions is None:
                _become(step.regions, RegionKind.SHARED)
        inputs = [self._view(self.values[node]) for node in self.placeholders]
        found: Any = self.output.args[0]
        found = found if isinstance(found, tuple | list) else (found,)
        return Runner(self._parts(steps), inputs, list(fx.map_arg(tuple(found), self._argument)))

    def _steps(self, node: fx.Node) -> list[NodeStep]:
        done = node in self.emitter.ends.values()
        called = node.op in ("call_function", "call_module")
        known = isinstance(self.values.get(node), int | float)
        if done or not called or known or self._is_view(node):
            return []
        instructions = self._instructions(node)
        ends = [self.emitter.ends[n] for n in (node, *node.users) if n in self.emitter.ends]
        step = NodeStep(node, instructions, [r for n in (node, *ends) for r in self._regions(n)])
        if instructions is None:
            for each in (node, *node.all_input_nodes):
                step.regions += self._regions(each)
        else:
            parts = [part for instruction in instructions for part in instruction]
            step.regions = [part.region for part in parts if isinstance(part, Operand)]
        return [step]

    def _instructions(self, node: fx.Node) -> list[Instruction] | None:
        emit = EMIT.get(node.target)
        self.emitter.made, ends = [], dict(self.emitter.ends)
        value = self.values[node]
        if isinstance(value, Tensor) and value.numel() == 0 and not _acts(node):
            return []
        if emit is None:
            return None
        try:
            emit(self.emitter, node)
        except Outside:
            self.emitter.ends = ends
            return None
        return self.emitter.made

    def _is_view(self, node: fx.Node) -> bool:
        """Whether the node has no memory of its own and writes none."""
        found, given = self._regions(node), self._read(node)
        return bool(found) and not _acts(node) and all(r in given for r in found)

    def _read(self, node: fx.Node) -> set[Region]:
        return {r for n in node.all_input_nodes for r in self._regions(n)}

    def _needed(self, steps: list[NodeStep]) -> list[NodeStep]:
        """Returns the steps, except steps whose results are never read."""
        read = {r for n in self.output.all_input_nodes for r in self._regions(n)}
        kept = []
        for step in reversed(steps):
            if _acts(step.node) or any(r in read for r in step.results):
                read.update(step.regions)
                kept.append(step)
        return kept[::-1]

    # --- steps to parts ---

    def _parts(self, steps: list[NodeStep]) -> list[Part]:
        groups: list[list[NodeStep]] = []
        for step in steps:
            joins = groups and step.instructions is not None
            if joins and groups[-1][-1].instructions is not None:
                groups[-1].append(step)
            else:
                groups.append([step])
        seen: dict[Region, int] = {}
        for number, group in enumerate(groups):
            for region in (r for step in group for r in step.regions):
                if seen.setdefault(region, number) != number and region.kind is RegionKind.OWN:
                    region.kind = RegionKind.SHARED
        for region in seen:
            if region.kind is RegionKind.SHARED:
                region.tensor = torch.empty(region.bytes, dtype=torch.uint8, device="cpu")
        return [self._part(group) for group in groups]

    def _part(self, group: list[NodeStep]) -> Part:
        if group[0].instructions is None:
            return self._call(group[0].node)
        regions = list(dict.fromkeys(r for step in group for r in step.regions))
        own, size = lay_out(r for r in regions if r.kind is RegionKind.OWN)
        places = {region: (0, begin) for region, begin in own.items()}
        others = [r for r in regions if r.kind is not RegionKind.OWN]
        places |= {region: (0, 0) for region in others if region.bytes == 0}
        others = [region for region in others if region.bytes > 0]
        others.sort(key=lambda r: r.kind in (RegionKind.INPUT, RegionKind.RESULT))
        for slot, region in enumerate(others, 1):
            places[region] = slot, 0
        words = [
            word
            for step in group
            for instruction in step.instructions or ()
            for word in encode(instruction, places)
        ]
        filled = [region for region in others if region.tensor is not None]
        storages = [r.tensor.untyped_storage() for r in filled if r.tensor is not None]
        addresses = [storage.data_ptr() for storage in storages]
        inputs = others[len(storages) :]
        sizes = [size, *(r.bytes for r in others)]
        program = Program(words, sizes, [0, *addresses, *(0 for _ in inputs)])
        kinds = [region.kind for region in filled]
        encoded = torch.tensor(words, dtype=torch.int64, device="cpu")
        return Run(program, inputs, storages, kinds, encoded, sizes)

    def _call(self, node: fx.Node) -> TorchCall:
        arguments = fx.map_arg((node.args, node.kwargs), self._argument)
        target: Any = node.target
        if node.op == "call_module":
            target = self.gm.get_submodule(target)
        given, found = self._read(node), self._regions(node)
        tensors = _tensors(self.values[node])
        results = [
            None if r in given else self._view(t) for t, r in zip(tensors, found, strict=True)
        ]
        return TorchCall(target, *arguments, results)

    def _argument(self, node: fx.Node) -> Any:
        value = self.values[node]
        if isinstance(value, Tensor):
            return self._view(value)
        if isinstance(value, int | float) or node.op == "get_attr":
            return value
        if not isinstance(value, tuple | list) or not all(isinstance(t, Tensor) for t in value):
            raise NotImplementedError(
                f"{node} is {value!r}: a program holds tensors, and numbers that are known when it "
                "is made"
            )
        return [self._view(t) for t in value]

    def _view(self, value: Tensor) -> View:
        shape, strides = tuple(value.shape), tuple(value.stride())
        region = self.regions[storage_key(value)]
        return View(region, value.dtype, shape, strides, int(value.storage_offset()))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _become(regions: list[Region], kind: RegionKind) -> None:
    """Gives the kind `kind` to those of the regions that so far belong to the program alone."""
    for region in regions:
        if region.kind is RegionKind.OWN:
            region.kind = kind


def _acts(node: fx.Node) -> bool:
    """Whether a node does more than return a result: it writes to an argument or has another side
    effect."""
    return bool(written(node)) or node.is_impure()
