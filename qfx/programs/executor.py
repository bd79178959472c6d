"""Executor: runs the parts of a graph (programs, and calls of PyTorch between them) on their
memory."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qfx._C import Program
from qfx.host.tensors import tree_leaves, tree_map
from qfx.io.huge_pages import into_huge_pages
from qfx.programs.bytecode import contiguous_strides
from qfx.programs.inputs import NOTHING, Bound, View, addresses_of
from qfx.programs.memory import Region, RegionKind
from qfx.programs.streaming import Streaming


class Run(NamedTuple):
    program: Program
    inputs: list[Region]
    storages: list[Any]  # the storages of its constants and numbers
    kinds: list[RegionKind]  # of each held storage
    words: Tensor
    bytes: list[int]  # of each slot: own memory, constants, given regions


class TorchCall(NamedTuple):
    """A call that PyTorch runs. Its results are copied to where programs read them; None marks a
    result that is already there."""

    target: Any
    args: Any
    kwargs: Any
    results: list[View | None]


Part = Run | TorchCall


class Runner:
    """An executable graph. It is called like the graph from which it was built, with tensors of the
    same shapes, and returns the list of results: new tensors, except for views of inputs.
    Concurrent calls from several threads run one after the other."""

    def __init__(self, parts: list[Part], inputs: list[View], results: list[Any]) -> None:
        self.parts, self.inputs, self.results = parts, inputs, results
        leaves = [leaf for leaf in tree_leaves(results) if isinstance(leaf, View)]
        self.made = [
            r for r in dict.fromkeys(v.region for v in leaves) if r.kind is RegionKind.RESULT
        ]
        self._turn = threading.Lock()
        self._runs = {part.program: Placed(part) for part in parts if isinstance(part, Run)}
        self._alone = len(parts) == len(self._runs) and is_whole(results)
        weights = (each for program in self._runs for each in program.weights)
        into_huge_pages((address, count) for address, count, _ in weights)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Runner holds addresses of this process's memory and is neither copied nor pickled: "
            "build another of its graph"
        )

    def __call__(self, *inputs: Tensor, bound: Bound = NOTHING) -> list[Any]:
        """Runs the graph and returns its results. `bound`: the last inputs, which many calls share
        (see `Bound`)."""
        with self._turn:
            addresses = addresses_of(inputs, bound, self.inputs)
            if self._alone:
                return self._whole(addresses, bound)
            every = zip(self.inputs, (*inputs, *bound.tensors), strict=True)
            memory = {view.region: tensor for view, tensor in every}
            for region in self.made:
                memory[region] = made = torch.empty(region.bytes, dtype=torch.uint8, device="cpu")
                addresses[region] = made.data_ptr()
            for part in self.parts:
                if isinstance(part, Run):
                    self._runs[part.program].run(addresses, bound)
                else:
                    _call(part, memory)
        return [_resolved(result, memory) for result in self.results]

    def _whole(self, addresses: dict[Region, int], bound: Bound) -> list[Tensor]:
        """Runs a graph that consists of programs alone and whose results are separate new tensors,
        and returns these."""
        found = []
        for view in self.results:
            made = torch.empty(view.sizes, dtype=view.dtype, device="cpu")
            addresses[view.region] = made.data_ptr()
            found.append(made)
        for run in self._runs.values():
            run.run(addresses, bound)
        return found

    @property
    def work(self) -> float:
        """Multiply-accumulates of one run of the programs. An operation that multiplies no matrices
        counts its elements."""
        return float(sum(program.work for program in self._runs))

    def writes(self, inputs: range) -> bool:
        """Whether a program writes to one of these inputs, given by index."""
        regions = {self.inputs[i].region for i in inputs}
        runs = (part for part in self.parts if isinstance(part, Run))
        return any(
            run.inputs[slot - 1 - len(run.storages)] in regions
            for run in runs
            for slot in run.program.written
            if slot > len(run.storages)
        )

    @property
    def outside(self) -> list[str]:
        """The names of the operators that PyTorch runs."""
        return [str(part.target) for part in self.parts if isinstance(part, TorchCall)]


class Placed:
    """A program that remembers the addresses of its last run, so that the next one passes only
    those that may have changed."""

    def __init__(self, run: Run) -> None:
        self._streaming = Streaming(run.program)
        self._inputs = run.inputs
        self._bound: Callable[[], Bound | None] = lambda: None
        self._loose: tuple[list[int], list[Region]] = ([], [])

    def run(self, addresses: dict[Region, int], bound: Bound) -> None:
        """Runs the program. `addresses`: the address of each input and result, except the inputs in
        `bound`."""
        if self._bound() is bound:
            places, regions = self._loose
            self._streaming.run(places, [addresses[region] for region in regions])
            return
        self._bound = lambda: None
        every = bound.addresses | addresses
        self._streaming.run([every[region] for region in self._inputs])
        loose = [i for i, region in enumerate(self._inputs) if region in addresses]
        self._loose = loose, [self._inputs[i] for i in loose]
        self._bound = weakref.ref(bound)


def is_whole(results: list[Any]) -> bool:
    """Whether each result is a contiguous tensor that is alone in new memory and fills it."""
    regions = [result.region for result in results if isinstance(result, View)]
    return len(results) == len(regions) == len({*regions}) and all(
        view.region.kind is RegionKind.RESULT
        and view.offset == 0
        and view.strides == contiguous_strides(view.sizes)
        and view.region.bytes == prod(view.sizes) * view.dtype.itemsize
        for view in results
    )


def _call(part: TorchCall, memory: dict[Region, Tensor]) -> None:
    args, kwargs = _resolved((part.args, part.kwargs), memory)
    found = part.target(*args, **kwargs)
    leaves = [t for t in tree_leaves(found) if isinstance(t, Tensor)]
    for view, tensor in zip(part.results, leaves, strict=True):
        if view is not None:
            _tensor(view, memory).copy_(tensor)


def _resolved(tree: Any, memory: dict[Region, Tensor]) -> Any:
    def tensor(leaf: Any) -> Any:
        return _tensor(leaf, memory) if isinstance(leaf, View) else leaf

    return tree_map(tensor, tree)


def _tensor(view: View, memory: dict[Region, Tensor]) -> Tensor:
    tensor = view.region.tensor
    if tensor is None:
        tensor = memory[view.region]
        begin = tensor.storage_offset() * tensor.element_size() // view.dtype.itemsize
    else:
        begin = 0
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=view.dtype, device="cpu").set_(
        storage, begin + view.offset, view.sizes, view.strides
    )
