"""Programs on disk: what another process made of the same model, with the weights of this one.

`<user's cache>/qfx/programs/<key>`, MOST of them: beyond, those that were not read for the longest
time go. A file holds a digest of itself, the instructions, and constants by the names that the
model has for them. docs/generate.md
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qfx.generate.program_key import SWITCH, digest_of, key_of
from qfx.programs import Runner
from qfx.programs.stored import Storing, bytes_in, restored
from qfx.values.atomic_write import write_bytes
from qfx.values.errors import UserError
from qfx.values.user_folder import own_bytes, user_folder

_log = logging.getLogger(__name__)

FORMAT = b"qfx programs 1\n"
MOST = 64  # files, of some 300 kB for 30 layers
_MOST_BYTES = 1 << 20  # of constants that are none of the model's
_OURS = re.compile(r"[0-9a-f]{64}|\.[0-9a-f]{16}\.partial")


def kept(
    model: nn.Module,
    steps: Any,
    inputs: tuple[Tensor, ...],
    make: Callable[[], Runner],
    vectors: Mapping[str, Tensor],
    **others: Any,
) -> Runner:
    """The runner for these inputs from disk, or made now and kept there. `steps`, `others`: see
    `key_of`. `vectors`: float32 copies of parameters and buffers, which programs read too."""
    folder = _folder()
    if folder is None:
        return make()
    try:
        key, held = key_of(model, steps, inputs, **others)
    except Exception as why:  # Unknown, and what objects of a model raise when they are looked at
        _log.info("the programs are not kept on disk: %s", why)
        return make()
    held |= {f"{name} as float32": tensor for name, tensor in vectors.items()}
    found = _read(folder / key, held)
    if found is not None:
        _log.info("read from %s", folder / key)
        return found
    runner = make()
    _write(folder / key, runner, held)
    return runner


def _folder() -> Path | None:
    """Where programs are kept; None where that is off or cannot be."""
    told = os.environ.get(SWITCH, "")
    if told == "0":
        return None
    try:
        folder = Path(told) if told else user_folder() / "programs"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as why:
        _log.info("the programs are not kept on disk: %s", why)
        return None
    return folder


def _read(path: Path, held: Mapping[str, Tensor]) -> Runner | None:
    try:
        return _runner(own_bytes(path), path.name, held)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as why:
        _log.warning("%s is not read, the programs are made anew: %s", path, why)
        return None


def _runner(data: bytes, key: str, held: Mapping[str, Tensor]) -> Runner | None:
    """None where it is of other weights. ValueError for what `_write` did not write."""
    begin = len(FORMAT)
    digest, rest = data[begin : begin + 32], data[begin + 32 :]
    if data[:begin] != FORMAT or hashlib.sha256(rest).digest() != digest:
        raise ValueError("it is cut off or damaged")
    head, _, body = rest.partition(b"\n")
    told = json.loads(head)
    if told["key"] != key:
        raise ValueError("it was another file")
    if told["values"] is not None and told["values"] != digest_of(held):
        return None
    tensors = {f"model {name}": bytes_in(t.untyped_storage()) for name, t in held.items()}
    for name, dtype, begin, size in told["tensors"]:
        plain = torch.frombuffer(bytearray(body[begin : begin + size]), dtype=torch.uint8)
        tensors[name] = plain.view(getattr(torch, dtype))
    try:
        return restored(told["program"], tensors)
    except UserError as why:
        raise ValueError(str(why)) from None


def _write(path: Path, runner: Runner, held: Mapping[str, Tensor]) -> None:
    storing = Storing({f"model {name}": tensor for name, tensor in held.items()})
    try:
        program = storing.described(runner)
    except UserError as why:
        _log.info("the programs are not kept on disk: %s", why)
        return
    own = storing.tensors.keys() & {*program["constants"]}
    if sum(storing.tensors[name].numel() for name in own) > _MOST_BYTES:
        _log.info("the programs are not kept on disk: they have large constants of their own")
        return
    parts, table, end = [], [], 0
    for name, tensor in storing.tensors.items():
        parts.append(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        table.append([name, str(tensor.dtype).removeprefix("torch."), end, len(parts[-1])])
        end += len(parts[-1])
    values = digest_of(held) if storing.made else None
    told = {"key": path.name, "values": values, "program": program, "tensors": table}
    rest = json.dumps(told).encode() + b"\n" + b"".join(parts)
    try:
        write_bytes(path, FORMAT + hashlib.sha256(rest).digest() + rest, mode=0o600)
        _forget(path.parent)
    except OSError as why:
        _log.info("the programs are not kept on disk: %s", why)


def _forget(folder: Path) -> None:
    """Removes the programs that were not of use for longest; other processes may do so at once."""
    ages = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            if _OURS.fullmatch(path.name):
                ages.append((path.lstat().st_mtime, path))
    for _, path in sorted(ages)[:-MOST]:
        path.unlink(missing_ok=True)
