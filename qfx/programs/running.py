"""Run: the parts of a graph, programs and what PyTorch runs between them, on their memory."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qfx._C import Program
from qfx.host.tensors import tree_leaves, tree_map
from qfx.programs.words import Kind, Region


@dataclass(frozen=True)
class View:
    """A tensor in a region; strides and offset in elements."""

    region: Region
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Run(NamedTuple):
    program: Program
    given: list[Region]
    held: list[Any]  # the storages of its constants and numbers
    kinds: list[Kind]  # of each of them
    words: Tensor
    bytes: list[int]  # of each slot: its own memory, the constants, what is given


class Call(NamedTuple):
    """By PyTorch: what it gives is copied to where programs look for it; None lies there."""

    target: Any
    args: Any
    kwargs: Any
    results: list[View | None]


Part = Run | Call


class Runner:
    """Called as the graph that it was built of, with tensors of the shapes it was built for; gives
    the list of its results, new tensors but where they are views of what was given. Threads take
    turns."""

    def __init__(
        self,
        parts: list[Part],
        given: list[View],
        results: list[Any],
    ) -> None:
        self.parts, self.given, self.results = parts, given, results
        leaves = [leaf for leaf in tree_leaves(results) if isinstance(leaf, View)]
        self.made = [r for r in dict.fromkeys(v.region for v in leaves) if r.kind is Kind.RESULT]
        self._turn = threading.Lock()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Runner holds addresses of this process's memory and is neither copied nor pickled: "
            "build another of its graph"
        )

    def __call__(self, *inputs: Tensor) -> list[Any]:
        if len(inputs) != len(self.given):
            raise TypeError(f"{len(inputs)} inputs, expected {len(self.given)}")
        memory = {
            view.region: _fitting(tensor, view)
            for tensor, view in zip(inputs, self.given, strict=True)
        }
        for region in self.made:
            memory[region] = torch.empty(region.bytes, dtype=torch.uint8, device="cpu")
        with self._turn:
            for part in self.parts:
                if isinstance(part, Run):
                    part.program.run([memory[region].data_ptr() for region in part.given])
                else:
                    _call(part, memory)
        return [_resolved(result, memory) for result in self.results]

    @property
    def outside(self) -> list[str]:
        """The names of what PyTorch runs."""
        return [str(part.target) for part in self.parts if isinstance(part, Call)]


def _fitting(tensor: Any, expected: View) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"an input is a {type(tensor).__name__}, expected a tensor")
    if tensor.shape != expected.sizes or tensor.dtype != expected.dtype:
        raise ValueError(
            f"an input is {tensor.dtype} {tuple(tensor.shape)}, expected {expected.dtype} "
            f"{expected.sizes}, for which the program was built"
        )
    if not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_neg():
        raise ValueError(
            f"an input is on {tensor.device} with strides {tensor.stride()}, expected it in the "
            "memory of the CPU, contiguous"
        )
    return tensor


def _call(part: Call, memory: dict[Region, Tensor]) -> None:
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
    held = view.region.tensor
    if held is None:
        held = memory[view.region]
        begin = held.storage_offset() * held.element_size() // view.dtype.itemsize
    else:
        begin = 0
    storage = held.untyped_storage()
    return torch.empty(0, dtype=view.dtype, device="cpu").set_(
        storage, begin + view.offset, view.sizes, view.strides
    )
