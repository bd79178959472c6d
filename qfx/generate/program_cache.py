"""Programs on disk: what another process made of the same model, with the weights of this one.

`<user's cache>/qfx/programs/<key>`, MOST of them (qfx/io/disk_cache.py). A file holds the
instructions, and constants by the names that the model has for them. docs/generate.md
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qfx.generate.program_key import SWITCH, key_of, values_digest
from qfx.io.disk_cache import DiskCache, user_folder
from qfx.io.errors import UserError
from qfx.programs import Runner
from qfx.programs.stored import Storing, bytes_in, restored

_log = logging.getLogger(__name__)

MOST = 64  # files, of some 300 kB for 30 layers
_MOST_BYTES = 1 << 20  # of constants that are none of the model's
_KEYS = re.compile(r"[0-9a-f]{64}")


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
    cache = _cache()
    if cache is None:
        return make()
    try:
        key, held = key_of(model, steps, inputs, **others)
    except Exception as why:  # Unknown, and what objects of a model raise when they are looked at
        _log.info("the programs are not kept on disk: %s", why)
        return make()
    held |= {f"{name} as float32": tensor for name, tensor in vectors.items()}
    found = _read(cache, key, held)
    if found is not None:
        _log.info("read from %s", cache.folder / key)
        return found
    runner = make()
    _write(cache, key, runner, held)
    return runner


def _cache() -> DiskCache | None:
    """Where programs are kept; None where that is off or cannot be."""
    chosen = os.environ.get(SWITCH, "")
    if chosen == "0":
        return None
    try:
        return DiskCache(Path(chosen) if chosen else user_folder() / "programs", _KEYS, MOST)
    except OSError as why:
        _log.info("the programs are not kept on disk: %s", why)
    except ValueError as why:
        _log.warning("the programs are not kept on disk: %s", why)
    return None


def _read(cache: DiskCache, key: str, held: Mapping[str, Tensor]) -> Runner | None:
    try:
        return _runner(cache.read(key), held)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as why:
        _log.warning("the programs are made anew: %s", why)
        return None


def _runner(data: bytes, held: Mapping[str, Tensor]) -> Runner | None:
    """None where it is of other weights. ValueError for what `_write` did not write."""
    head, _, body = data.partition(b"\n")
    told = json.loads(head)
    if told["values"] is not None and told["values"] != values_digest(held):
        return None
    tensors = {f"model {name}": bytes_in(t.untyped_storage()) for name, t in held.items()}
    for name, dtype, begin, size in told["tensors"]:
        plain = torch.frombuffer(bytearray(body[begin : begin + size]), dtype=torch.uint8)
        tensors[name] = plain.view(getattr(torch, dtype))
    try:
        return restored(told["program"], tensors)
    except UserError as why:
        raise ValueError(str(why)) from None


def _write(cache: DiskCache, key: str, runner: Runner, held: Mapping[str, Tensor]) -> None:
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
    values = values_digest(held) if storing.made else None
    told = {"values": values, "program": program, "tensors": table}
    try:
        cache.write(key, json.dumps(told).encode() + b"\n" + b"".join(parts))
    except (OSError, ValueError) as why:
        _log.info("the programs are not kept on disk: %s", why)
