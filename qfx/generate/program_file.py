"""ProgramFile: the description of the programs in a file of `save_programs`, checked before memory
is allocated for them.

The file may come from an untrusted source, so everything in it is checked: numbers are integers in
their range, the inputs of every program match its cache, masks and tokens, and memory and work are
limited by the size of the weights and the cache in the file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qfx.generate.buckets import MOST_ROWS, ROWS
from qfx.generate.layout import CacheLayout, with_rings
from qfx.io.errors import UserError, printable
from qfx.ops.kv_blocks import TOKENS
from qfx.ops.kv_cache import kv_shapes
from qfx.programs import Runner

FORMAT = 5
_MOST = 1 << 40  # the largest size
_SMALL = 1 << 26  # bytes of working memory that any file may use
_TABLES = 24  # bytes of tables for each token of a sequence: its number, and its slots
# Operations per token: for each byte of weights, which several layers may share; for each byte of
# the cache, which several heads share; and those that any file may use.
_WEIGHTS_WORK, _CACHE_WORK, _SMALL_WORK = 16, 128, 1 << 18

Kind = list[Any]  # [type, sizes]


@dataclass(frozen=True)
class ProgramFile:
    """The checked description of programs.

    `batch`: the batch size. `layout`: the layout of the cache. `shapes`: (heads, features) of each
    layer's cache. `bits`: the bits of cached keys and values. `programs`: number of tokens of a
    step -> description of its program.
    """

    layout: CacheLayout
    batch: int
    shapes: tuple[tuple[int, int], ...]
    bits: tuple[int, int]
    programs: dict[int, dict[str, Any]]

    @property
    def cache(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of the tensors of the cache, four for each layer."""
        return [
            each
            for i, (heads, features) in enumerate(self.shapes)
            for each in kv_shapes(self.batch, heads, self.layout.slots_of(i), features, *self.bits)
        ]

    def inputs(self, rows: int) -> list[Kind]:
        """Returns the inputs, each as [type, sizes], that `program_file` requires of the program
        for a step of `rows` tokens."""
        tokens: Kind = ["int64", [self.batch, rows]]
        last: list[Kind] = [["int64", [1]]] if rows > MOST_ROWS else []
        where: list[Kind] = []
        for slots in self.layout.slots:
            where += (tokens, ["int32", [self.batch, -(-slots // TOKENS)]])
        masks = [["bool", [self.batch, 1, rows, kind.slots]] for kind in self.layout.kinds.values()]
        cache: list[Kind] = [[str(d).removeprefix("torch."), [*s]] for s, d in self.cache]
        return [tokens, tokens, *where, *last, *masks, *cache]


def program_file(
    description: Any, tensors: Mapping[str, Tensor], max_memory: int | None
) -> ProgramFile:
    """Checks a description of programs, parsed from JSON, and returns it.

    `tensors`: the tensors of the file. `max_memory`: the largest number of bytes in total, by
    default the memory of the machine. Raises UserError for a description that is malformed or needs
    more.
    """
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        form = description.get("format") if isinstance(description, dict) else description
        raise UserError(
            f"the programs have format {printable(repr(form))}, and this qfx reads format {FORMAT}"
            ": save them again with this qfx"
        )
    if "graph" in description:
        raise UserError("the file holds a program of fixed shapes: load_program reads it")
    file = ProgramFile(
        layout=_layout(description),
        batch=_size(description["batch"], "batch"),
        shapes=tuple((_size(h, "heads"), _size(d, "features")) for h, d in description["shapes"]),
        bits=_bits(description["bits"]),
        programs={_rows(rows): each for rows, each in description["programs"].items()},
    )
    if len(file.shapes) != len(file.layout.layers):
        raise UserError(
            f"the file describes {len(file.shapes)} shapes of caches and {len(file.layout.layers)} "
            "layers, expected one shape for each layer"
        )
    if 1 not in file.programs:
        raise UserError("the file has no program of one token, which every decoder needs")
    for rows, described in file.programs.items():
        if described["inputs"] != file.inputs(rows):
            raise UserError(
                f"the program of {rows} tokens has inputs that do not fit the cache and the batch "
                f"size {file.batch} of the file"
            )
        ((_, dtype, sizes, _, _),) = described["results"]
        rows_of_logits = 1 if rows > MOST_ROWS else rows
        if dtype != "float32" or sizes[:2] != [file.batch, rows_of_logits] or len(sizes) != 3:
            raise UserError(
                f"the program of {rows} tokens returns {dtype} {sizes}, expected float32 logits "
                f"[{file.batch}, {rows_of_logits}, vocabulary]"
            )
    _check_memory(file, tensors, max_memory)
    return file


def check_steps(
    file: ProgramFile, tensors: Mapping[str, Tensor], runners: Mapping[int, Runner]
) -> None:
    """Raises UserError if a step would do more work than the sizes of its weights and cache account
    for, or would write to its tokens, places or masks."""
    weights, cache = weight_bytes(tensors), _cache_bytes(file)
    for rows, runner in runners.items():
        if runner.writes(range(len(runner.inputs) - len(file.cache))):
            raise UserError(
                f"the program of {rows} tokens writes to its tokens, positions or masks, and may "
                "write only to the cache"
            )
        step = f"a step of {rows} tokens with batch size {file.batch}"
        check_work(step, runner.work, rows * file.batch, weights, rows, cache)


def check_work(what: str, work: float, tokens: int, weights: int, steps: int, cache: int) -> None:
    """Raises UserError if one run of `what` takes more operations than `tokens` that meet all
    `weights`, in bytes, and `steps` passes over the `cache`, in bytes, account for."""
    most = tokens * (_WEIGHTS_WORK * weights + _SMALL_WORK) + steps * _CACHE_WORK * cache
    if work > most:
        raise UserError(
            f"{what} takes {work:.3g} operations, and {weights} bytes of weights and {cache} bytes "
            f"of cache explain at most {most:.3g}: the file is damaged or was not written by qfx"
        )


def _check_memory(file: ProgramFile, tensors: Mapping[str, Tensor], max_memory: int | None) -> None:
    # while a mask is computed, the rows of a table and the mask exist
    layout = file.layout
    seen = sum(kind.slots for kind in layout.kinds.values())
    masks = 2 * file.batch * max(file.programs) * seen
    tables = _TABLES * layout.length * (1 + len(layout.slots)) + 4 * seen
    own = sum(
        sum(number_of_bytes(n) for n in (each["bytes"][0], *each["made"]))
        for each in file.programs.values()
    )
    held = Held(f"batch size {file.batch} with {layout.length} tokens", "cache", _cache_bytes(file))
    check_memory(weight_bytes(tensors), held, masks + tables + own, max_memory)


class Held(NamedTuple):
    """The memory that `subject` needs besides weights and working memory: `bytes` of `what`."""

    subject: str
    what: str
    bytes: int


def check_memory(weights: int, held: Held, working: int, max_memory: int | None) -> None:
    """Raises UserError if the bytes of `working` memory are more than `weights` and `held` account
    for, or if all of them are more than `max_memory`, by default the memory of the machine."""
    most = 4 * (weights + held.bytes) + _SMALL
    if working > most:
        raise UserError(
            f"the steps need {working} bytes of working memory, and {weights} bytes of weights and "
            f"{held.bytes} bytes of {held.what} explain at most {most}: the file is damaged or was "
            "not written by qfx"
        )
    room = max_memory
    if room is None:
        room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    total = weights + held.bytes + working
    if total > room:
        raise UserError(
            f"{held.subject} needs {total} bytes of memory, {held.bytes} of them for the "
            f"{held.what}, and max_memory is {room}: save programs of smaller shapes (max_length, "
            "batch size), or raise max_memory"
        )


def weight_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Returns the bytes of weights and other constants. Instructions, which are int64 tensors, are
    left out: a file cannot raise its limits by having more of them."""
    return sum(t.numel() for t in tensors.values() if t.dtype == torch.uint8)


def _cache_bytes(file: ProgramFile) -> int:
    return sum(prod(shape) * dtype.itemsize for shape, dtype in file.cache)


def number_of_bytes(value: Any) -> int:
    """Returns a number of bytes of a description. Raises UserError for any other value."""
    if type(value) is not int or not 0 <= value <= _MOST:
        raise UserError(
            f"{printable(repr(value))} bytes of memory: expected an integer from 0 to 2^40"
        )
    return value


def _size(value: Any, what: str) -> int:
    if type(value) is not int or not 1 <= value <= _MOST:
        raise UserError(f"{what}={printable(repr(value))}: expected an integer from 1 to 2^40")
    return value


def _layout(description: dict[str, Any]) -> CacheLayout:
    windows = {_text(kind): _window(size) for kind, size in description["windows"]}
    layers = tuple(_text(kind) for kind in description["layers"])
    if unknown := sorted(set(layers) - windows.keys()):
        raise UserError(
            f"a layer is of the kind {printable(repr(unknown[0]))}, and the file has no window for "
            "this kind"
        )
    return with_rings(_size(description["length"], "length"), windows, layers)


def _window(value: Any) -> int | None:
    return None if value is None else _size(value, "window")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise UserError(f"the kind of a layer is {printable(repr(value))}, expected a string")
    return value


def _bits(value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or any(b not in (4, 8) for b in value):
        raise UserError(f"bits={printable(repr(value))}: expected two numbers, each 4 or 8")
    return int(value[0]), int(value[1])


def _rows(value: str) -> int:
    if value not in map(str, ROWS):
        raise UserError(
            f"the file has a program of {printable(repr(value))} tokens, expected one of "
            f"{', '.join(map(str, ROWS))}"
        )
    return int(value)
