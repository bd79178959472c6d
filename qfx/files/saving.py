"""save: a quantized model becomes a folder, and replaces the one that was there in one step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from torch import Tensor, nn

from qfx.files.leftovers import remove_leftovers
from qfx.files.manifest import FORMAT, MARK, NAME, File, Manifest, read_manifest, tensor_file_name
from qfx.files.model_state import ModelState, state_of
from qfx.files.tensor_file import safetensors, write_tensors
from qfx.host.dynamo import uncompiled_module
from qfx.io.atomic_write import Partial, naming, sync_folder, write_bytes
from qfx.io.errors import UserError
from qfx.io.folder_lock import locked, made_folder
from qfx.io.recipe_files import RecipeFiles, current_recipe, one_of_two, settle
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

    Files: `model-<16 digits of its SHA-256>.safetensors`, several of at most `shard_size` bytes for
    a larger model (a tensor that is larger has one of its own), and `qfx.json`, which says what
    they hold. Stored are the codes and scales, in no layout of a processor, all other parameters
    and buffers in their types, and buffers that the state dict leaves out; a tensor with several
    names once. `recipe`: the one that the model was quantized by, for
    `qfx.Recipe.load(folder / "recipe.json")`; codes of the int8 linears are left out of it, the
    model has them. `qfx.load` reads the folder.

    An earlier model in the folder is replaced, with its recipe, by renaming `qfx.json`, last of all
    and when everything else is on the disk: whatever stops the process, the folder holds the old
    model or the new one. Only then are the files of the old one removed. Processes that save into
    one folder wait for each other; `.qfx.lock` is their lock. Raises ValueError, before anything is
    written, for a model of which files cannot hold something, and where the folder has a `qfx.json`
    or would lose a `recipe.json` that qfx did not write; OSError, with the old model left.
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
                remove_leftovers(folder, RECIPE)


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


def _without_codes(recipe: Recipe, linears: Collection[str]) -> Recipe:
    sites = (replace(s, rounding=None) if s.name in linears else s for s in recipe.sites)
    return replace(recipe, sites=tuple(sites))


def _replace(
    folder: Path,
    shards: list[dict[str, Tensor]],
    state: ModelState,
    recipe: RecipeFiles | None,
) -> None:
    """First all data, under names that nothing refers to; then the one rename that counts."""
    old_recipe = _replaced_recipe(folder, recipe)
    with ExitStack() as partials:
        files = dict(_write_tensors(folder, tensors, partials) for tensors in shards)
        if recipe is not None and recipe.codes_name is not None:
            write_bytes(folder / recipe.codes_name, recipe.codes, like=folder / RECIPE)
        linears = {name: linear.token for name, linear in state.linears.items()}
        said = Manifest(files, linears, state.same, state.derived, recipe is not None)
        text = said.to_json().encode()
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
    """The JSON of the recipe that goes with the model that is replaced, or that `new` replaces.
    Raises UserError where qfx.json or recipe.json cannot be read: it is not replaced then."""
    belongs = (folder / NAME).exists() and read_manifest(folder).recipe
    return current_recipe(folder / RECIPE) if belongs or new is not None else None


def _write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], partials: ExitStack
) -> tuple[str, File]:
    """Gives a file its name once it is on the disk and its digest is known."""
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
