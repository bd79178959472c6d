"""Reads state dicts of models that torchao has quantized to int8, in memory or as safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qfx.files.foreign.item import Item
from qfx.files.foreign.state_dict_import import Foreign
from qfx.files.foreign.weight import ForeignGrid, ForeignWeight
from qfx.files.tensor_file import TensorEntry, TensorIndex, safetensors, table_of, tensor_of
from qfx.host.tensors import wraps_tensors
from qfx.io.errors import UserError, printable
from qfx.io.safe_read import missing_as_os_error, parsed
from qfx.nn.state_checks import check_kind
from qfx.values.limits import FLOATS
from qfx.values.scheme import QSpec

KIND = "Int8Tensor"
PARTS = ("qdata", "scale", "zero_point")
UNREAD = ("act_quant_scale", "act_quant_zero_point", "act_pre_scale")
_IN_MEMORY = Path("the state dict")
_NAMES = "tensor_names"  # a key of the metadata that torchao writes


def torchao_state(state: Mapping[str, Any]) -> Foreign:
    """Returns the model of a state dict in memory. Raises UserError for a kind of tensor subclass
    that qfx does not know."""
    at = str(_IN_MEMORY)
    items = {name: _item_of_value(name, value, at) for name, value in state.items()}
    if not any(item.kind for item in items.values()):
        raise UserError(f"{at} has no tensor of torchao in it: load_state_dict takes a plain one")
    return Foreign(at, items)


def _item_of_value(name: str, value: Any, at: str) -> Item:
    here = f"{at}: {printable(str(name))}"
    if not isinstance(value, Tensor):
        raise UserError(f"{here} is of type {type(value).__name__}, expected a tensor")
    value = value.detach()
    if not wraps_tensors(value):
        return Item(_IN_MEMORY, tuple(value.shape), value.dtype, value.clone)
    if type(value).__name__ != KIND:
        raise _unread(here, type(value).__name__)
    if any(getattr(value, part, None) is not None for part in UNREAD):
        raise UserError(f"{here} has scales of activations, which qfx.load does not read")
    quantized: Any = value
    parts = {
        part: getattr(quantized, part) for part in PARTS if getattr(quantized, part) is not None
    }
    entries = {n: TensorEntry(t.dtype, tuple(t.shape), 0) for n, t in parts.items()}
    activations = quantized.act_quant_kwargs
    settings = None if activations is None else {
        "granularity": type(activations.granularity).__name__,
        "mapping_type": activations.mapping_type.name,
    }  # fmt: skip
    copies: dict[str, Callable[[], Tensor]] = {n: t.clone for n, t in parts.items()}
    return _item(_IN_MEMORY, here, entries, copies, quantized.dtype, quantized.block_size, settings)


def _unread(here: str, kind: str) -> UserError:
    return UserError(
        f"{here} is a {printable(kind)}, and of torchao's tensors qfx.load reads {KIND} (version 2 "
        "of its configurations)"
    )


def is_torchao(path: Path, magic: bytes) -> bool:
    """Whether it is a safetensors file with the metadata that torchao writes."""
    if path.suffix == ".json" or magic[:2] == b"PK":
        return False
    library = safetensors()
    try:
        with missing_as_os_error(path), library.safe_open(path, "pt") as opened:
            metadata = opened.metadata() or {}
    except library.SafetensorError:
        return False  # errors are reported when the file is read
    return _NAMES in metadata


def torchao_file(path: Path) -> Foreign:
    """Returns the model of a safetensors file. Raises UserError, which names the file and what is
    wrong, or OSError."""
    table = table_of(path)
    at = printable(str(path))
    names = parsed(table.metadata[_NAMES], f"{at}: {_NAMES}")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{at}: {_NAMES} is no list of names")
    items, used = {}, set()
    for name in names:
        here = f"{at}: {printable(name)}"
        described = parsed(table.metadata.get(name, "null"), here)
        kind = described.get("_type") if isinstance(described, dict) else None
        if kind == "Tensor":
            items[name] = _plain(table, name, here)
            used.add(name)
        elif kind == KIND:
            items[name], parts = _described(table, name, described, here)
            used |= parts
        else:
            raise _unread(here, str(kind))
    if more := sorted({*table.entries} - used):
        raise UserError(f"{at} holds {printable(more[0])}, of which its metadata says nothing")
    return Foreign(at, items)


def _plain(table: TensorIndex, name: str, here: str) -> Item:
    if name not in table.entries:
        raise UserError(f"{here} is not there, and the metadata names it")
    entry = table.entries[name]
    return Item(table.path, entry.shape, entry.dtype, partial(tensor_of, table, name))


def _described(
    table: TensorIndex, name: str, described: dict[str, Any], here: str
) -> tuple[Item, set[str]]:
    owner, _, last = name.rpartition(".")
    prefix = f"{owner}._{last}_" if owner else f"_{last}_"
    names = {part: f"{prefix}{part}" for part in (*PARTS, *UNREAD)}
    present = {part: name for part, name in names.items() if name in table.entries}
    if unread := [part for part in present if part in UNREAD]:
        raise UserError(f"{here} has {unread[0]}, which qfx.load does not read")
    entries = {part: table.entries[name] for part, name in present.items()}
    reads = {part: partial(tensor_of, table, name) for part, name in present.items()}
    data = described.get("_data")
    if not isinstance(data, dict):
        raise UserError(f"{here} has no _data")
    dtype = _dtype(data.get("dtype"), here)
    item = _item(
        table.path,
        here,
        entries,
        reads,
        dtype,
        data.get("block_size"),
        _activation_settings(data, here),
    )
    return item, {*present.values()}


def _dtype(raw: Any, here: str) -> torch.dtype:
    text = raw.get("_data") if isinstance(raw, dict) else None
    known = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}
    if not isinstance(text, str) or text not in known:
        raise UserError(f"{here} is of the type {printable(repr(raw))}, expected one of {[*known]}")
    return known[text]


def _activation_settings(data: dict[str, Any], here: str) -> dict[str, str] | None:
    raw = data.get("act_quant_kwargs")
    if raw is None:
        return None
    inner = raw.get("_data") if isinstance(raw, dict) else None
    try:
        return {
            "granularity": str(inner["granularity"]["_type"]),  # type: ignore[index]
            "mapping_type": str(inner["mapping_type"]["_data"]),  # type: ignore[index]
        }
    except (TypeError, KeyError):
        text = printable(json.dumps(raw))
        raise UserError(f"{here} says of activations {text}, which is not read") from None


def _item(
    path: Path,
    here: str,
    entries: Mapping[str, TensorEntry],
    reads: Mapping[str, Callable[[], Tensor]],
    dtype: torch.dtype,
    block: Any,
    activations: Mapping[str, str] | None,
) -> Item:
    missing = [part for part in PARTS[:2] if part not in entries]
    if missing or len(entries["qdata"].shape) != 2:
        raise UserError(f"{here} has no {' and '.join(missing) or 'matrix qdata'}")
    n, k = entries["qdata"].shape
    grid, groups = _grid(here, block, n, k)
    wanted = {"qdata": ((torch.int8,), (n, k)), "scale": (FLOATS, (n, groups)),
              "zero_point": ((torch.int8, torch.int32), (n, groups))}  # fmt: skip
    for part, entry in entries.items():
        like = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        try:
            check_kind(like, part, *wanted[part])
        except ValueError as why:
            raise UserError(f"{here}: {why}") from None
    zeros = reads["zero_point"]().int() if "zero_point" in reads else None
    if zeros is not None and not zeros.any():
        zeros = None
    grid = grid._replace(zeros=zeros is not None)

    def weight() -> ForeignWeight:
        return ForeignWeight(reads["qdata"](), reads["scale"](), grid, zeros)

    def floats() -> Tensor:
        return weight().values().to(dtype)

    x = _activations(here, activations)
    return Item(path, (n, k), dtype, floats, KIND, grid, weight, x)


def _grid(here: str, block: Any, n: int, k: int) -> tuple[ForeignGrid, int]:
    good = isinstance(block, list | tuple) and len(block) == 2
    if not good or not all(type(size) is int and size > 0 for size in block) or block[0] != 1:
        raise UserError(
            f"{here} has blocks of {printable(repr(block))}, which are no rows or parts of rows"
        )
    if k % block[1]:
        raise UserError(f"{here} has K={k}, which blocks of {block[1]} do not divide")
    return ForeignGrid(8, 0 if block[1] == k else block[1]), k // block[1]


def _activations(here: str, activations: Mapping[str, str] | None) -> QSpec:
    if activations is None:
        return QSpec(symmetric=False)
    if activations["granularity"] != "PerRow" or activations["mapping_type"] not in (
        "SYMMETRIC",
        "ASYMMETRIC",
    ):
        raise UserError(
            f"{here} says of activations {printable(repr(dict(activations)))}, which is not read"
        )
    return QSpec(symmetric=activations["mapping_type"] == "SYMMETRIC")
