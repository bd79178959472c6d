"""ProgramFile: the description in a file of `save_programs`, checked before memory is made of it.

A file is data from anywhere, so nothing of it is used as it stands: numbers are integers in their
range, the inputs of every program are those that its cache, masks and tokens have, and memory and
work are bounded by what the file itself brings, its weights and its cache.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from qfx.generate.rows import MOST_ROWS, ROWS
from qfx.ops.kv_blocks import TOKENS
from qfx.ops.kv_cache import kv_shapes
from qfx.programs import Runner
from qfx.values.errors import UserError
from qfx.values.printable import printable

FORMAT = 3
_MOST = 1 << 40  # a size
_SMALL = 1 << 26  # bytes that any file may work in
# Operations a token, for each byte of weights, which layers may share, and for each byte of its
# cache, which heads share; and of any file.
_WEIGHTS_WORK, _CACHE_WORK, _SMALL_WORK = 16, 128, 1 << 18

Kind = list[Any]  # [type, sizes]


@dataclass(frozen=True)
class ProgramFile:
    """`length` tokens of `batch` texts; `windows`: kind of layer -> keys that a query sees, None of
    all; `shapes`: (heads, features) of each layer's cache, in `bits` of keys and of values;
    `programs`: tokens of a step -> its description."""

    length: int
    batch: int
    windows: dict[str, int | None]
    shapes: tuple[tuple[int, int], ...]
    bits: tuple[int, int]
    programs: dict[int, dict[str, Any]]

    @property
    def cache(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and types of the tensors of the cache, four of each layer."""
        return [
            each
            for heads, features in self.shapes
            for each in kv_shapes(self.batch, heads, self.length, features, *self.bits)
        ]

    def inputs(self, rows: int) -> list[Kind]:
        """The inputs that the program of `rows` tokens must declare, each as [type, sizes]."""
        tokens: Kind = ["int64", [self.batch, rows]]
        last: list[Kind] = [["int64", [1]]] if rows > MOST_ROWS else []
        mask: Kind = ["bool", [self.batch, 1, rows, self.length]]
        cache: list[Kind] = [[str(d).removeprefix("torch."), [*s]] for s, d in self.cache]
        table: Kind = ["int32", [self.batch, -(-self.length // TOKENS)]]
        return [tokens, tokens, tokens, table, *last, *[mask] * len(self.windows), *cache]


def program_file(told: Any, tensors: Mapping[str, Tensor], max_memory: int | None) -> ProgramFile:
    """`told`: the description, as JSON. `tensors`: those of the file. `max_memory`: bytes that all
    of it may take, those of the machine by default. Raises UserError, with the numbers."""
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        form = told.get("format") if isinstance(told, dict) else told
        raise UserError(
            f"the programs have format {printable(repr(form))}, this qfx reads {FORMAT}: save them "
            "again"
        )
    file = ProgramFile(
        length=_size(told["length"], "length"),
        batch=_size(told["batch"], "batch"),
        windows={_text(kind): _window(size) for kind, size in told["windows"]},
        shapes=tuple((_size(h, "heads"), _size(d, "features")) for h, d in told["shapes"]),
        bits=_bits(told["bits"]),
        programs={_rows(rows): each for rows, each in told["programs"].items()},
    )
    if 1 not in file.programs:
        raise UserError("there is no program of one token")
    for rows, described in file.programs.items():
        if described["inputs"] != file.inputs(rows):
            raise UserError(f"the program of {rows} tokens has inputs of another cache or batch")
        ((_, dtype, sizes, _, _),) = described["results"]
        asked = 1 if rows > MOST_ROWS else rows
        if dtype != "float32" or sizes[:2] != [file.batch, asked] or len(sizes) != 3:
            raise UserError(f"the program of {rows} tokens gives no logits of {asked}")
    _check_memory(file, tensors, max_memory)
    return file


def check_steps(
    file: ProgramFile, tensors: Mapping[str, Tensor], runners: Mapping[int, Runner]
) -> None:
    """Raises UserError where a step would take longer than its weights and cache can explain, or
    write to its tokens, places or masks."""
    weights, cache = _bytes(tensors), _cache_bytes(file)
    for rows, runner in runners.items():
        if runner.writes(range(len(runner.given) - len(file.cache))):
            raise UserError(f"the program of {rows} tokens writes to an input that is no cache")
        tokens = rows * file.batch
        most = tokens * (_WEIGHTS_WORK * weights + _SMALL_WORK) + rows * _CACHE_WORK * cache
        if runner.work > most:
            raise UserError(
                f"a step of {rows} tokens of {file.batch} texts takes {runner.work:.3g} operations,"
                f" and at most {most:.3g} go with {weights} bytes of weights and {cache} of cache"
            )


def _check_memory(file: ProgramFile, tensors: Mapping[str, Tensor], max_memory: int | None) -> None:
    weights, cache = _bytes(tensors), _cache_bytes(file)
    # as they are made: the rows of a table, then the mask of them
    masks = 2 * file.batch * max(file.programs) * file.length * len(file.windows)
    own = sum(
        sum(_number(n) for n in (each["bytes"][0], *each["made"]))
        for each in file.programs.values()
    )
    working, most = masks + own, 4 * (weights + cache) + _SMALL
    if working > most:
        raise UserError(
            f"its steps work in {working} bytes, and at most {most} go with {weights} bytes of "
            f"weights and {cache} of cache"
        )
    room = max_memory
    if room is None:
        room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    total = weights + cache + working
    if total > room:
        raise UserError(
            f"{file.batch} texts of {file.length} tokens take {total} bytes, of which {cache} are "
            f"cache, and there are {room} (max_memory)"
        )


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    """The bytes of the constants; instructions are int64 tensors and explain no work."""
    return sum(t.numel() for t in tensors.values() if t.dtype == torch.uint8)


def _cache_bytes(file: ProgramFile) -> int:
    return sum(prod(shape) * dtype.itemsize for shape, dtype in file.cache)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise UserError(f"{printable(repr(value))} is no number of bytes")
    return value


def _size(value: Any, what: str) -> int:
    if type(value) is not int or not 1 <= value <= _MOST:
        raise UserError(f"{what}={printable(repr(value))} is no size from 1 to 2^40")
    return value


def _window(value: Any) -> int | None:
    return None if value is None else _size(value, "window")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise UserError(f"{printable(repr(value))} is no kind of layer")
    return value


def _bits(value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or any(b not in (4, 8) for b in value):
        raise UserError(f"bits={printable(repr(value))}: expected two of 4 and 8")
    return int(value[0]), int(value[1])


def _rows(value: str) -> int:
    if value not in map(str, ROWS):
        raise UserError(
            f"a program of {printable(repr(value))} tokens: expected {', '.join(map(str, ROWS))}"
        )
    return int(value)
