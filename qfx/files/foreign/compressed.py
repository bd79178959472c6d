"""Reads a model in the format compressed-tensors: a folder that llm-compressor writes and vLLM
reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from qfx.files.foreign.compressed_config import LARGEST, CompressedConfig, Group, compressed_config
from qfx.files.foreign.expert_items import with_products
from qfx.files.foreign.item import Item
from qfx.files.foreign.state_dict_import import Foreign
from qfx.files.foreign.weight import ForeignWeight
from qfx.files.tensor_file import TensorEntry, TensorIndex, on_own_pages, table_of, tensor_of
from qfx.io.errors import UserError, printable
from qfx.io.safe_read import bytes_of, parsed
from qfx.values.limits import FLOATS

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Tensors of a linear other than its codes, which are `weight` or `weight_packed`.
BESIDE = ("weight_scale", "weight_zero_point", "weight_shape")
UNREAD = ("weight_g_idx", "input_scale", "input_zero_point", "output_scale", "weight_global_scale")
_WORD = 32
_AT_ONCE = 2**16  # words that are unpacked at once


def compressed_model(folder: Path, skeleton: nn.Module) -> Foreign:
    """Returns the model of a folder. Raises UserError, which names the file and what is wrong, or
    OSError."""
    config = compressed_config(folder)
    files = _Files(folder, _tables(folder))
    owners = [n.rpartition(".")[0] for n in files.where if n.endswith(".weight_scale")]
    modules = dict(skeleton.named_modules(remove_duplicate=False))
    items = {}
    for owner in owners:
        group = _group(files, owner, config, modules.get(owner))
        items[f"{owner}.weight"] = _linear(files, owner, group)
    parts = {f"{owner}.{part}" for owner in owners for part in ("weight", "weight_packed", *BESIDE)}
    for name in files.where:
        if name not in parts:
            entry = files.entry(name)
            path, read = files.path(name), partial(files.read, name)
            items[name] = Item(path, entry.shape, entry.dtype, read)
    at = printable(str(folder))
    return Foreign(at, with_products(items, skeleton, at))


@dataclass(frozen=True)
class _Files:
    folder: Path
    tables: tuple[TensorIndex, ...]

    @cached_property
    def where(self) -> Mapping[str, TensorIndex]:
        found: dict[str, TensorIndex] = {}
        for table in self.tables:
            for name in table.entries:
                if name in found:
                    raise UserError(
                        f"{printable(str(self.folder))} has {printable(name)} in two files"
                    )
                found[name] = table
        return found

    def entry(self, name: str) -> TensorEntry:
        return self.where[name].entries[name]

    def path(self, name: str) -> Path:
        return self.where[name].path

    def read(self, name: str) -> Tensor:
        return tensor_of(self.where[name], name)


def _tables(folder: Path) -> tuple[TensorIndex, ...]:
    index = folder / INDEX
    if not index.exists():
        return (table_of(folder / SINGLE),)
    at = printable(str(index))
    raw = parsed(bytes_of(index, LARGEST).decode("utf-8", "replace"), at)
    files = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise UserError(f"{at} has no weight_map from tensors to files")
    names = sorted({*files.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(f"{at}: {printable(name)} is no name of a file beside it")
        if not (folder / name).exists():
            raise UserError(f"{printable(str(folder / name))} is not there, and {INDEX} names it")
    return tuple(table_of(folder / name) for name in names)


def _group(files: _Files, owner: str, config: CompressedConfig, module: nn.Module | None) -> Group:
    classes = tuple(each.__name__ for each in type(module).__mro__) if module else ("Linear",)
    group = config.group_of(owner, classes)
    here = f"{printable(str(files.path(f'{owner}.weight_scale')))}: {printable(owner)}"
    if group is None:
        raise UserError(f"{here} is quantized, and no group of config.json says how")
    for part in UNREAD:
        if f"{owner}.{part}" in files.where:
            raise UserError(f"{here} has {part}, which qfx.load does not read")
    return group


class _Parts(NamedTuple):
    """A linear [N, K] of the file: the name of the tensor that holds its quantized weight, and the
    group of config.json that it belongs to."""

    n: int
    k: int
    codes: str
    group: Group

    @property
    def groups(self) -> int:
        return self.k // self.group.grid.group if self.group.grid.group else 1


def _linear(files: _Files, owner: str, group: Group) -> Item:
    codes = f"{owner}.{'weight_packed' if group.packed else 'weight'}"
    here = f"{printable(str(files.path(f'{owner}.weight_scale')))}: {printable(owner)}"
    if codes not in files.where:
        raise UserError(f"{here} has a scale, and no {codes.rpartition('.')[2]}")
    n, k = _shape(files, owner, codes, group, here)
    parts = _Parts(n, k, codes, group)
    if group.grid.group and k % group.grid.group:
        raise UserError(f"{here} has K={k}, which groups of {group.grid.group} do not divide")
    _check(files, owner, parts, here)
    weight = partial(_weight, files, owner, parts)
    dtype = files.entry(f"{owner}.weight_scale").dtype
    grid = group.grid._replace(half=None if dtype == torch.float32 else dtype)

    def floats() -> Tensor:
        return weight().values().to(dtype)

    kind = f"{group.kind} in {group.grid.bits} bits"
    return Item(files.path(codes), (n, k), dtype, floats, kind, grid, weight, group.x or grid.usual)


def _shape(files: _Files, owner: str, codes: str, group: Group, here: str) -> tuple[int, int]:
    entry = files.entry(codes)
    if not group.packed:
        shape: tuple[int, ...] = entry.shape
    else:
        name = f"{owner}.weight_shape"
        if name not in files.where or files.entry(name).shape != (2,):
            raise UserError(f"{here} has no weight_shape of two numbers")
        shape = tuple(files.read(name).tolist())
    if len(shape) != 2 or not all(type(size) is int and 0 <= size < 2**31 for size in shape):
        raise UserError(f"{here} has the shape {list(shape)}, which is that of no linear")
    return shape[0], shape[1]


def _check(files: _Files, owner: str, parts: _Parts, here: str) -> None:
    """Checks dtypes and shapes of all tensors of a linear, without reading them. Raises
    UserError."""
    n, k, g = parts.n, parts.k, parts.groups
    grid, packed = parts.group.grid, parts.group.packed
    words = torch.int32 if packed else torch.int8
    wanted = {
        parts.codes: ((words,), (n, _words(k, grid.bits) if packed else k)),
        f"{owner}.weight_scale": (FLOATS, (n, g)),
    }
    zero = f"{owner}.weight_zero_point"
    if grid.zeros:
        wanted[zero] = ((words,), (_words(n, grid.bits) if packed else n, g))
    elif zero in files.where:
        raise UserError(f"{here} has zero points, and config.json says that it is symmetric")
    for name, (dtypes, shape) in wanted.items():
        found = files.entry(name) if name in files.where else None
        if found is None or found.dtype not in dtypes or found.shape != shape:
            given = f"{found.dtype} {list(found.shape)}" if found else "not there"
            types = " or ".join(map(str, dtypes))
            raise UserError(
                f"{here}: {name.rpartition('.')[2]} is {given}, expected {types} {list(shape)}"
            )


def _words(elements: int, bits: int) -> int:
    return -(-elements * bits // _WORD)


def _weight(files: _Files, owner: str, parts: _Parts) -> ForeignWeight:
    zero, codes = None, files.read(parts.codes)
    scale = files.read(f"{owner}.weight_scale")
    half = None if scale.dtype == torch.float32 else scale.dtype
    grid = parts.group.grid._replace(half=half)
    if grid.zeros:
        zero = files.read(f"{owner}.weight_zero_point")
    if parts.group.packed:
        codes = _codes(codes, grid.bits, parts.k)
        if zero is not None:
            zero = _unpacked(zero.t(), grid.bits)[:, : parts.n].t()
    return ForeignWeight(codes, scale, grid, None if zero is None else zero.int().contiguous())


def _codes(words: Tensor, bits: int, k: int) -> Tensor:
    """Unpacks the integers of a weight to int8 [N, K], a few rows at a time, because malloc keeps
    the memory of larger temporary tensors."""
    found = on_own_pages((len(words), k), torch.int8)
    step = max(1, _AT_ONCE // max(words.shape[1], 1))
    for first in range(0, len(words), step):
        rows = slice(first, first + step)
        found[rows] = _unpacked(words[rows], bits)[:, :k]
    return found


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpacks integers of 4 or 8 bits from int32 words [R, W] to int8 [R, W * 32 / bits]. A word
    begins with its lowest bits; the file stores each integer plus half of the range."""
    raw = words.flatten().view(torch.uint8).reshape(len(words), -1)
    if bits == 4:
        raw = torch.stack([raw & 15, raw >> 4], -1).reshape(len(raw), -1)
    return raw.view(torch.int8).sub_(8) if bits == 4 else (raw ^ 128).view(torch.int8)
