"""save: a quantized model becomes a folder."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from torch import Tensor, nn

from qfx.files.manifest import FORMAT, MARK, NAME, File, Manifest, read_manifest
from qfx.files.model_state import ModelState, state_of
from qfx.files.tensor_file import safetensors, table_of, write_tensors
from qfx.host.dynamo import uncompiled_module
from qfx.values.atomic_write import Writer, write_files
from qfx.values.errors import UserError
from qfx.values.printable import printable
from qfx.values.recipe import Recipe

SHARD_SIZE = 2_000_000_000
RECIPE = "recipe.json"


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    recipe: Recipe | None = None,
    shard_size: int = SHARD_SIZE,
) -> None:
    """Writes a model that `quantize_` or `convert` made into `folder`, which is made
    if it is not there.

    Files: `model.safetensors`, or several of at most `shard_size` bytes (a tensor that is larger
    has one of its own), and `qfx.json`, which says what they hold. Stored are the codes and scales,
    in no layout of a processor, all other parameters and buffers in their types, and buffers that
    the state dict leaves out; a tensor with several names once. `recipe`: the one that the model
    was quantized by, for `qfx.Recipe.load(folder / "recipe.json")`; codes of the int8 linears are
    left out of it, the model has them. `qfx.load` reads the folder.

    An earlier model in the folder is replaced when all is written. Raises ValueError, before
    anything is written, for a model of which files cannot hold something, and where a file in the
    folder would be replaced that `save` did not write; OSError.
    """
    safetensors()
    if type(shard_size) is not int or shard_size < 1:
        raise UserError(f"save: shard_size={shard_size!r} is no number of bytes")
    state, folder = state_of(uncompiled_module(model)), Path(folder)
    shards = _named(_shards(state, shard_size))
    old = _earlier(folder, {*shards})
    folder.mkdir(parents=True, exist_ok=True)
    if recipe is not None:
        _without_codes(recipe, state.linears).save(folder / RECIPE)
    _write(folder, shards, state, recipe is not None)
    gone = {*old.files, *([RECIPE] if old.recipe else [])} if old else set()
    for name in gone - {*shards, *([RECIPE] if recipe else [])}:
        (folder / name).unlink(missing_ok=True)


def _shards(state: ModelState, limit: int) -> list[dict[str, Tensor]]:
    """The tensors in order, cut where a file would be too large; a linear is not cut."""
    shards: list[dict[str, Tensor]] = [{}]
    room = limit
    for unit in _units(state):
        size = sum(t.numel() * t.element_size() for t in unit.values())
        if size > room and shards[-1]:
            shards.append({})
            room = limit
        shards[-1].update(unit)
        room -= size
    return shards


def _units(state: ModelState) -> list[dict[str, Tensor]]:
    units: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.tensors.items():
        owner, _, part = name.rpartition(".")
        of_linear = owner in state.linears and part in state.linears[owner].PARTS
        units.setdefault(f"{owner}." if of_linear else name, {})[name] = tensor
    return list(units.values())


def _named(shards: list[dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    count = len(shards)
    return {f"model-{i:05}-of-{count:05}.safetensors": s for i, s in enumerate(shards, 1)}


def _earlier(folder: Path, names: set[str]) -> Manifest | None:
    """What is replaced; UserError where a file that is in the way is another's."""
    for name in names:
        path = folder / name
        if path.exists() and table_of(path).metadata.get(MARK) is None:
            raise UserError(
                f"save: {printable(str(path))} is there, and is not of a model that qfx.save wrote:"
                " save into another folder"
            )
    return read_manifest(folder) if (folder / NAME).exists() else None


def _without_codes(recipe: Recipe, linears: Collection[str]) -> Recipe:
    sites = (replace(s, rounding=None) if s.name in linears else s for s in recipe.sites)
    return replace(recipe, sites=tuple(sites))


def _write(
    folder: Path, shards: Mapping[str, Mapping[str, Tensor]], state: ModelState, recipe: bool
) -> None:
    """The description last: it has the digests of the others."""
    written: dict[str, File] = {}

    def of_shard(name: str) -> Writer:
        def write(file: BinaryIO) -> None:
            tensors = shards[name]
            digest = write_tensors(file, tensors, {"format": "pt", MARK: str(FORMAT)})
            written[name] = File(file.tell(), digest, tuple(tensors))

        return write

    def description(file: BinaryIO) -> None:
        linears = {name: linear.token for name, linear in state.linears.items()}
        said = Manifest(written, linears, state.same, state.derived, recipe)
        file.write(said.to_json().encode())

    write_files({folder / n: of_shard(n) for n in shards} | {folder / NAME: description})
