"""save: writes a quantized model to a folder, and replaces an earlier model there in one step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from torch import Tensor, nn

from qfx.files.manifest import (
    FORMAT,
    MARK,
    NAME,
    File,
    Manifest,
    is_tensor_file_name,
    read_manifest,
    tensor_file_name,
)
from qfx.files.model_state import ModelState, state_of
from qfx.files.tensor_file import safetensors, table_of, write_tensors
from qfx.host.dynamo import uncompiled_module
from qfx.io.atomic_write import Partial, naming, remove_partials, sync_folder, write_bytes
from qfx.io.errors import UserError
from qfx.io.folder_lock import locked, made_folder
from qfx.io.recipe_files import RecipeFiles, current_recipe, one_of_two, settle, sweep_codes
from qfx.nn.stacked_weight import StackedWeight
from qfx.nn.stored_modules import Stored
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
    """Writes a model that `quantize_` or `convert` made to `folder`, which is created if necessary.

        qfx.save(qfx.quantize_(model, "w8a8"), "folder")

    Files: `model-<16 digits of its SHA-256>.safetensors`, for a larger model several of at most
    `shard_size` bytes (a larger tensor has its own file), and `qfx.json`, which describes them.
    They store the int8 codes and scales of linears, in a layout that does not depend on the
    processor, all other parameters and buffers in their dtypes, and buffers that the state dict
    leaves out. A tensor with several names is stored once. `recipe`: the result of `qfx.calibrate`
    that the model was quantized with, stored as "recipe.json", which `qfx.Recipe.load` reads;
    without the codes of int8 linears, which are in the model. `qfx.load` reads the folder.

    An earlier model in the folder is replaced, together with its recipe, by renaming `qfx.json`
    after everything else is on the disk. If the process is stopped at any time, the folder contains
    either the old model or the new one. The files of the old model are removed last. Processes that
    save to the same folder wait for each other; `.qfx.lock` is their lock.

    Raises ValueError, before anything is written, for a model with values that files cannot store,
    and if the folder has a `qfx.json`, or would lose a `recipe.json`, that qfx did not write.
    Raises OSError if writing fails; the old model is kept.
    """
    safetensors()
    if type(shard_size) is not int or shard_size < 1:
        raise UserError(f"save: shard_size={shard_size!r} is no number of bytes")
    state, folder = state_of(uncompiled_module(model)), Path(folder)
    shards = _shards(state, shard_size)
    beside = None
    if recipe is not None:
        beside = _without_codes(recipe, state.linears).files(folder / RECIPE)
    made_folder(folder)
    with locked(folder) as alone:
        try:
            _replace(folder, shards, state, beside)
        finally:
            settle(folder / RECIPE)
            if alone:
                _remove_leftovers(folder, RECIPE)


def _shards(state: ModelState, limit: int) -> list[dict[str, Tensor]]:
    """Splits the tensors, in order, into files of at most `limit` bytes; the tensors of a linear
    stay together."""
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


def _without_codes(recipe: Recipe, stored: Mapping[str, Stored]) -> Recipe:
    """Returns the recipe without the codes of the weights that the files hold. Experts have names
    of float parameters in recipes, and `up` and `down` in files."""
    experts = {
        name.rpartition(".")[0] for name, m in stored.items() if isinstance(m, StackedWeight)
    }

    def held(name: str) -> bool:
        return name in stored or name.rpartition(".")[0] in experts

    sites = (replace(s, rounding=None) if held(s.name) else s for s in recipe.sites)
    return replace(recipe, sites=tuple(sites))


def _replace(
    folder: Path,
    shards: list[dict[str, Tensor]],
    state: ModelState,
    recipe: RecipeFiles | None,
) -> None:
    """Writes all data under new names, which nothing refers to yet, and then renames qfx.json,
    which replaces the old model by the new one in a single step."""
    old_recipe = _replaced_recipe(folder, recipe)
    with ExitStack() as partials:
        files = dict(_write_tensors(folder, tensors, partials) for tensors in shards)
        if recipe is not None and recipe.codes_name is not None:
            write_bytes(folder / recipe.codes_name, recipe.codes, like=folder / RECIPE)
        linears = {name: linear.token for name, linear in state.linears.items()}
        manifest = Manifest(files, linears, state.same, state.derived, recipe is not None)
        text = manifest.to_json().encode()
        with naming(folder / NAME):
            description = partials.enter_context(Partial(folder / NAME))
            description.write(lambda file: file.write(text))
            sync_folder(folder)
        if recipe is not None or old_recipe is not None:
            new = recipe.json.decode() if recipe else None
            write_bytes(folder / RECIPE, one_of_two(text, new, old_recipe))
        with naming(folder / NAME):
            description.move(folder / NAME)
            sync_folder(folder)


def _replaced_recipe(folder: Path, new: RecipeFiles | None) -> str | None:
    """Returns the JSON of the recipe that belongs to the model being replaced, or that `new`
    replaces; None if there is none. Raises UserError if qfx.json or recipe.json cannot be read;
    nothing is replaced then."""
    belongs = (folder / NAME).exists() and read_manifest(folder).recipe
    return current_recipe(folder / RECIPE) if belongs or new is not None else None


def _write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], partials: ExitStack
) -> tuple[str, File]:
    """Writes one file of tensors; returns its name, which contains the SHA-256 of its content, and
    its description."""
    digest, size = "", 0

    def write(file: BinaryIO) -> None:
        nonlocal digest, size
        digest = write_tensors(file, tensors, {"format": "pt", MARK: str(FORMAT)})
        size = file.tell()

    with naming(folder):
        partial = partials.enter_context(Partial(folder / NAME))
        partial.write(write)
        partial.move(folder / tensor_file_name(digest), like=folder / NAME)
    return tensor_file_name(digest), File(size, digest, tuple(tensors))


def _remove_leftovers(folder: Path, recipe: str) -> None:
    """Removes partial files of dead processes, tensor files of `save` that qfx.json does not
    mention, and files with rounded weights that the recipe does not mention. `recipe`: the name of
    the recipe's file.

    The caller must hold the lock of the folder. Files of other programs are kept, and so are files
    that cannot be read or removed.
    """
    remove_partials(folder)
    sweep_codes(folder / recipe)
    with suppress(OSError, UserError):
        named = read_manifest(folder).files if (folder / NAME).exists() else {}
        for path in [*folder.iterdir()]:
            if is_tensor_file_name(path.name) and path.name not in named:
                _remove_if_ours(path)


def _remove_if_ours(path: Path) -> None:
    with suppress(OSError, UserError):
        if MARK in table_of(path).metadata:
            path.unlink()
