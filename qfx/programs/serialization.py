"""Serialization: converts runners to tensors and a description, and back. See docs/generate.md.

Only runners without calls of PyTorch can be serialized: those calls are Python objects, which no
file holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from qfx._C import Program
from qfx.io.errors import UserError
from qfx.programs.bytecode import ELEMENTS, contiguous_strides
from qfx.programs.executor import Run, Runner, TorchCall
from qfx.programs.inputs import View
from qfx.programs.memory import Region, RegionKind

Described = dict[str, Any]
_MOST = 1 << 48  # limit of a size, an offset, or a number of bytes
_AGAIN = "save it again with this version of qfx"


class Storing:
    """Collects the tensors of several runners that are serialized; a tensor that they share is
    stored once. `made`: whether a runner has a constant that was computed from other values. Such a
    constant is neither one of the `known` tensors nor a number of the graph."""

    def __init__(self, known: Mapping[str, Tensor] | None = None) -> None:
        """Begins without any tensors to store. `known`: tensors, by name, that need not be stored,
        because the process that restores the runners will have them."""
        self.tensors: dict[str, Tensor] = {}
        self.made = False
        self._names: dict[int, str] = {}  # by address, in the order of the files
        for name, tensor in (known or {}).items():
            self._names.setdefault(tensor.untyped_storage().data_ptr(), name)

    def described(self, runner: Runner) -> Described:
        """Returns the description of a runner. Raises ValueError if PyTorch runs parts of it."""
        if outside := sorted({str(p.target) for p in runner.parts if isinstance(p, TorchCall)}):
            raise UserError(
                f"this program cannot be saved, because PyTorch runs {', '.join(outside)} of it: "
                "qfx saves only programs that run without PyTorch"
            )
        ((run,),) = (runner.parts,)
        assert isinstance(run, Run)
        places = {view.region: ["input", i] for i, view in enumerate(runner.inputs)}
        places |= {region: ["result", i] for i, region in enumerate(runner.made)}
        return {
            "words": self._name(run.words),
            "bytes": run.bytes,
            "constants": [
                self._constant(*each) for each in zip(run.storages, run.kinds, strict=True)
            ],
            "given": [places[region] for region in run.inputs],
            "made": [region.bytes for region in runner.made],
            "inputs": [_kind_of(view) for view in runner.inputs],
            "results": [_described(view, places) for view in runner.results],
        }

    def _constant(self, storage: Any, kind: RegionKind) -> str:
        self.made |= storage.data_ptr() not in self._names and kind is not RegionKind.NUMBER
        return self._name(bytes_in(storage))

    def _name(self, tensor: Tensor) -> str:
        key = tensor.data_ptr()
        if key not in self._names:
            self._names[key] = f"tensor_{len(self._names):06}"
            self.tensors[self._names[key]] = tensor
        return self._names[key]


def restored(described: Described, tensors: Mapping[str, Tensor]) -> Runner:
    """Returns the runner for a description that `Storing.described` returned. `tensors`: by name,
    the tensors that `Storing` stored and those that it got as `known`. Raises ValueError for a
    description or instructions that this build did not write."""
    try:
        return _restored(described, tensors)
    except (KeyError, IndexError, TypeError, AttributeError) as why:
        raise UserError(f"the saved program cannot be read, {_AGAIN}: {why!r}") from None


def _restored(described: Described, tensors: Mapping[str, Tensor]) -> Runner:
    constants = [tensors[name] for name in described["constants"]]
    inputs = [_input(kind) for kind in described["inputs"]]
    places = {("input", i): view.region for i, view in enumerate(inputs)}
    made = [_number(n) for n in described["made"]]
    places |= {("result", i): Region(RegionKind.RESULT, n) for i, n in enumerate(made)}
    regions = [places[kind, i] for kind, i in described["given"]]
    words, sizes = tensors[described["words"]], [_number(n) for n in described["bytes"]]
    expected = [*(t.numel() for t in constants), *(region.bytes for region in regions)]
    if words.dtype != torch.int64 or words.ndim != 1:
        raise UserError(
            f"the saved program has instructions of {words.dtype} with {words.ndim} axes, expected "
            f"torch.int64 with 1 axis: {_AGAIN}"
        )
    if sizes[1:] != expected or any(t.dtype != torch.uint8 for t in constants):
        raise UserError(
            f"the saved program states other sizes of memory than its tensors have: {_AGAIN}"
        )
    addresses = [0, *(t.data_ptr() for t in constants), *(0 for _ in regions)]
    storages = [t.untyped_storage() for t in constants]
    program = Program(words.tolist(), sizes, addresses)
    if any(0 < slot <= len(storages) for slot in program.written):
        raise UserError(f"the saved program writes to its weights: {_AGAIN}")
    kinds = [RegionKind.CONSTANT for _ in storages]
    run = Run(program, regions, storages, kinds, words, sizes)
    results = [_view(each, places) for each in described["results"]]
    unused = {r for r in regions if r.kind is RegionKind.RESULT} - {view.region for view in results}
    if unused or len({*regions}) != len(regions):
        raise UserError(f"the saved program writes to memory that is not one result: {_AGAIN}")
    return Runner([run], inputs, results)


def bytes_in(storage: Any) -> Tensor:
    """Returns all memory of a storage as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def _kind_of(view: View) -> list[Any]:
    return [_name_of(view.dtype), list(view.sizes)]


def _input(kind: list[Any]) -> View:
    name, sizes = kind
    dtype, count = _dtype(name), 1
    for size in sizes:
        count *= _number(size)
    region = Region(RegionKind.INPUT, count * dtype.itemsize)
    return View(region, dtype, tuple(sizes), contiguous_strides(sizes), 0)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: Any) -> torch.dtype:
    for dtype in ELEMENTS:
        if _name_of(dtype) == name:
            return dtype
    raise UserError(f"the saved program has a tensor of unknown dtype {name!r}: {_AGAIN}")


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise UserError(
            f"the saved program has the size {value!r}, expected an integer up to 2^48: {_AGAIN}"
        )
    return value


def _described(view: View, places: Mapping[Region, list[Any]]) -> list[Any]:
    name = _name_of(view.dtype)
    return [places[view.region], name, list(view.sizes), list(view.strides), view.offset]


def _view(fields: list[Any], places: Mapping[Any, Region]) -> View:
    (kind, i), name, sizes, strides, offset = fields
    region, dtype = places[kind, i], _dtype(name)
    last = _number(offset)
    for size, stride in zip(sizes, strides, strict=True):
        last += max(_number(size) - 1, 0) * _number(stride)
    # strides of 0 would allow any number of elements, so it is bounded by the memory
    if max(last + 1, prod(sizes)) * dtype.itemsize > region.bytes:
        raise UserError(
            f"the saved program has a result that exceeds its {region.bytes} bytes: {_AGAIN}"
        )
    return View(region, dtype, tuple(sizes), tuple(strides), offset)
