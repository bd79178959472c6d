"""A disk cache of programs: a program that another process built for the same model is read, and
used with this model's weights.

The files are `<user's cache>/qfx/programs/<key>`, written by `qfx/io/disk_memo.py`. A file contains
the instructions, and constants by the names that the model has for them. See docs/generate.md.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qfx.generate.program_key import key_of, values_digest
from qfx.io.disk_memo import DiskMemo, NotCached
from qfx.io.errors import UserError
from qfx.programs import Runner
from qfx.programs.serialization import Storing, bytes_in, restored

_KEYS = re.compile(r"[0-9a-f]{64}")
_log = logging.getLogger(__name__)
PROGRAMS = DiskMemo(
    "program", "the programs", "programs", _KEYS, 64, _log
)  # a program of 30 layers takes 300 kB
_MOST_BYTES = 1 << 20  # largest total size of constants that do not belong to the model


def read_or_build(
    model: nn.Module,
    steps: Any,
    inputs: tuple[Tensor, ...],
    make: Callable[[], Runner],
    vectors: Mapping[str, Tensor],
    **others: Any,
) -> Runner:
    """Returns the program for these inputs, read from disk, or built by `make` and stored there.

    `steps`, `inputs`, `others`: the arguments of `key_of`. `vectors`: float32 copies of parameters
    and buffers, which programs also use.
    """
    return PROGRAMS.get(
        _ProgramEntry(lambda: key_of(model, steps, inputs, **others), make, vectors)
    )


class _ProgramEntry:
    """A program that is cached on disk. `tensors`: the tensors that a file refers to by name: those
    of the model, and the vectors. They are set when the key is computed."""

    def __init__(
        self,
        key_of_it: Callable[[], tuple[str, dict[str, Tensor]]],
        make: Callable[[], Runner],
        vectors: Mapping[str, Tensor],
    ) -> None:
        self._key, self._make, self._vectors = key_of_it, make, vectors
        self.tensors: dict[str, Tensor] = {}

    def key(self) -> str:
        try:
            key, tensors = self._key()
        except Exception as why:  # NoFingerprint, or any exception of the model's objects
            raise NotCached(str(why)) from why
        vectors = {f"{name} as float32": tensor for name, tensor in self._vectors.items()}
        self.tensors = tensors | vectors
        return key

    def read(self, data: bytes) -> Runner | None:
        return _runner(data, self.tensors)

    def make(self) -> Runner:
        return self._make()

    def written(self, value: Runner) -> bytes:
        return written(value, self.tensors)


def _runner(data: bytes, of_model: Mapping[str, Tensor]) -> Runner | None:
    """Returns the program that a file with the content `data` holds, with the weights `of_model`;
    None if the program has constants that were computed from other weights than these. Raises
    ValueError if `data` is not a result of the function `written`."""
    head, _, body = data.partition(b"\n")
    header = json.loads(head)
    if header["values"] is not None and header["values"] != values_digest(of_model):
        return None
    tensors = {f"model {name}": bytes_in(t.untyped_storage()) for name, t in of_model.items()}
    for name, dtype, begin, size in header["tensors"]:
        plain = torch.frombuffer(bytearray(body[begin : begin + size]), dtype=torch.uint8)
        tensors[name] = plain.view(getattr(torch, dtype))
    try:
        return restored(header["program"], tensors)
    except UserError as why:
        raise ValueError(str(why)) from None


def written(runner: Runner, tensors: Mapping[str, Tensor]) -> bytes:
    """Returns the whole content of the file for a program. Raises NotCached if it cannot be
    stored."""
    storing = Storing({f"model {name}": tensor for name, tensor in tensors.items()})
    try:
        program = storing.described(runner)
    except UserError as why:
        raise NotCached(str(why)) from None
    own = storing.tensors.keys() & {*program["constants"]}
    if sum(storing.tensors[name].numel() for name in own) > _MOST_BYTES:
        raise NotCached("they have large constants of their own")
    parts, table, end = [], [], 0
    for name, tensor in storing.tensors.items():
        parts.append(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        table.append([name, str(tensor.dtype).removeprefix("torch."), end, len(parts[-1])])
        end += len(parts[-1])
    values = values_digest(tensors) if storing.made else None
    header = {"values": values, "program": program, "tensors": table}
    return json.dumps(header).encode() + b"\n" + b"".join(parts)
