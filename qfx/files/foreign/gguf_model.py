"""Maps the tensors of a GGUF file, and the order of their rows, to the parameters of a skeleton."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qfx.files.foreign.expert_items import joined, parts_of_experts
from qfx.files.foreign.gguf_blocks import FLOATS, KINDS, floats_at, weight_at
from qfx.files.foreign.gguf_table import Block, GgufTable, gguf, gguf_table_of
from qfx.files.foreign.item import Item
from qfx.files.foreign.state_dict_import import Foreign
from qfx.io.errors import UserError, printable
from qfx.values.limits import FLOATS as MODEL_FLOATS

ARCHITECTURE = "general.architecture"
SPLIT = "split.count"
# Whether the rows of queries and keys are in llama.cpp's order of rotary positions, with the two
# rows of a pair next to each other; in transformers they are half a head apart. Architectures that
# are not listed differ in other ways too (norms with one added, transposed weights), or are not
# known.
INTERLEAVED = {
    "llama": True, "granite": True, "smollm3": True,
    "qwen2": False, "qwen3": False, "phi3": False, "starcoder2": False,
    "qwen3moe": False, "olmoe": False,
}  # fmt: skip
HEADS = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
# Tensors that a model computes from its config.
DERIVED = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}


def gguf_model(path: Path, skeleton: nn.Module) -> Foreign:
    """Returns the model of a GGUF file. Float tensors are converted to the dtypes of the skeleton,
    because the dtypes in the file depend on its kind of quantization. Raises UserError, which names
    the file and what is wrong, or OSError."""
    table = gguf_table_of(path)
    at = printable(str(path))
    if table.fields.get(SPLIT, 1) not in (0, 1):
        raise UserError(
            f"{at} is one of {printable(repr(table.fields[SPLIT]))} parts of a model: "
            "llama-gguf-split --merge makes one file of them"
        )
    state = skeleton.state_dict()
    names = _names(table, list(state), at)
    items = {
        name: _item(table, stored_name, state[name], name != stored_name)
        for name, stored_name in names.items()
    }
    experts = _experts(table, skeleton, state, at)
    for name, stored in experts.items():
        parts = [_stack(table, part, state[name].dtype, at) for part in stored]
        items[name] = joined(parts, name, at)
    used = {*names.values(), *(part for parts in experts.values() for part in parts)}
    rest = {*table.tensors} - used - DERIVED
    items |= {stored_name: _item(table, stored_name, None, False) for stored_name in sorted(rest)}
    return Foreign(at, items)


def _names(table: GgufTable, wanted: list[str], at: str) -> dict[str, str]:
    """Returns a dict: name in the skeleton -> name in the file. The skeleton may also use the names
    of the file."""
    if any(name in table.tensors for name in wanted):
        return {name: name for name in wanted if name in table.tensors}
    known = _name_map(table, at)
    found = {name: known.get_name(name, try_suffixes=(".weight", ".bias")) for name in wanted}
    return {
        name: stored_name for name, stored_name in found.items() if stored_name in table.tensors
    }


def _experts(
    table: GgufTable, skeleton: nn.Module, state: Mapping[str, Any], at: str
) -> dict[str, tuple[str, ...]]:
    """Returns a dict: name of a parameter with the weights of experts -> names of its parts in the
    file. A skeleton with the names of the file has no experts that are known."""
    each = parts_of_experts(skeleton)
    if not each or any(name in table.tensors for name in state):
        return {}
    known, found = _name_map(table, at), {}
    for name, parts in each.items():
        stored = tuple(f"{known.get_name(part)}.weight" for part in parts)
        if all(part in table.tensors for part in stored):
            found[name] = stored
    return found


def _stack(table: GgufTable, name: str, dtype: torch.dtype, at: str) -> Item:
    """Returns the item of a tensor [E, N, K]."""
    block = table.tensors[name]
    if len(block.shape) != 3 or not block.shape[0]:
        raise UserError(f"{at}: {printable(name)} is {list(block.shape)}, not [E, N, K]")
    dtype = dtype if dtype in MODEL_FLOATS else torch.float32
    count, size = block.shape[0], block.size // block.shape[0]

    def each() -> Iterator[Tensor]:
        for e in range(count):
            one = Block(block.kind, block.shape[1:], block.begin + e * size, size)
            yield floats_at(table.path, one, None, dtype)

    kind = "" if block.kind in FLOATS else block.kind
    floats = partial(floats_at, table.path, block, None, dtype)
    item = Item(table.path, block.shape, dtype, floats, kind, each=each)
    if block.kind not in KINDS:
        return item
    grid = KINDS[block.kind].grid
    weight = partial(weight_at, table.path, block, None)
    return item._replace(grid=grid, weight=weight, x=grid.usual)


def _name_map(table: GgufTable, at: str) -> Any:
    library = gguf()
    architecture = table.fields.get(ARCHITECTURE)
    if not isinstance(architecture, str) or architecture not in INTERLEAVED:
        raise UserError(
            f"{at} is of the architecture {printable(repr(architecture))}, and qfx.load reads "
            f"{', '.join(INTERLEAVED)}; a skeleton with the names of the file needs none"
        )
    blocks = _count(table, f"{architecture}.block_count", at)
    if blocks > len(table.tensors):
        raise UserError(f"{at} says that there are {blocks} blocks, and has {len(table.tensors)} "
                        "tensors")  # fmt: skip
    arch = {name: each for each, name in library.MODEL_ARCH_NAMES.items()}[architecture]
    return library.get_tensor_name_map(arch, blocks)


def _count(table: GgufTable, field: str, at: str) -> int:
    found = table.fields.get(field)
    if type(found) is not int or not 0 < found < 2**32:
        raise UserError(f"{at} says {printable(repr(found))} for {field}, which is no count")
    return found


def _item(table: GgufTable, name: str, wanted: Any, mapped: bool) -> Item:
    block = table.tensors[name]
    places = _places(table, name, block) if mapped else None
    like = wanted.dtype if isinstance(wanted, Tensor) else torch.float32
    dtype = like if like in MODEL_FLOATS else torch.float32
    floats = partial(floats_at, table.path, block, places, dtype)
    if block.kind in FLOATS:
        return Item(table.path, block.shape, dtype, floats)
    item = Item(table.path, block.shape, dtype, floats, block.kind)
    if block.kind not in KINDS or len(block.shape) != 2:
        return item
    weight = partial(weight_at, table.path, block, places)
    grid = KINDS[block.kind].grid
    return item._replace(grid=grid, weight=weight, x=grid.usual)


def _places(table: GgufTable, name: str, block: Block) -> Tensor | None:
    """Returns the row of the skeleton's weight or bias for each row of the file; None if the order
    is the same."""
    arch = str(table.fields[ARCHITECTURE])
    role = name.split(".")[-2] if "." in name else ""
    if role not in HEADS or not INTERLEAVED[arch]:
        return None
    at = printable(str(table.path))
    field = f"{arch}.{HEADS[role]}"
    if field not in table.fields:
        field = f"{arch}.{HEADS['attn_q']}"
    heads, rows = _count(table, field, at), block.shape[0] if block.shape else 0
    if rows % (2 * heads):
        raise UserError(
            f"{at}: {printable(name)} has {rows} rows, which do not make {heads} heads of pairs"
        )
    places = torch.arange(rows, dtype=torch.int64, device="cpu")
    return places.reshape(heads, 2, -1).transpose(1, 2).reshape(-1)
