"""load: turns a float model, which may be on the meta device, into the int8 model of a folder, a
file or a state dict."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from torch import Tensor, nn

from qfx.files.foreign.format_detection import foreign_of
from qfx.files.foreign.state_dict_import import Imported, imported
from qfx.files.foreign.weight import Activations
from qfx.files.manifest import MARK, NAME, File, Manifest, manifest_of
from qfx.files.model_state import buffers_of
from qfx.files.replaced import made_from, size_of
from qfx.files.skeleton import Fitted, fill, fitted
from qfx.files.tensor_file import TensorEntry, TensorIndex, open_table, tensors_of
from qfx.host.dynamo import uncompiled_module
from qfx.io.errors import UserError, printable
from qfx.io.recipe_files import LARGEST
from qfx.io.safe_read import FileSnapshot, bytes_of, parsed, snapshot_of
from qfx.nn.recurrent_opening import opened_recurrent
from qfx.nn.stored_modules import Stored
from qfx.values.config import Config, Configurable


class Saved(NamedTuple):
    """The open files of a saved model, the checked table of each, and the manifest, which is None
    for a single file. An open file can be read to its end even if it is replaced or removed
    meanwhile."""

    at: str
    tables: tuple[TensorIndex, ...]
    files: tuple[BinaryIO, ...]
    manifest: Manifest | None

    @property
    def entries(self) -> dict[str, TensorEntry]:
        return {name: entry for table in self.tables for name, entry in table.entries.items()}


def load(
    folder_or_file: str | Path | Mapping[str, Any],
    skeleton: nn.Module,
    *,
    x: Activations = "file",
    requantize: Configurable = None,
) -> nn.Module:
    """Loads a saved model into `skeleton`, a float model, in place, and returns it.

        model = qfx.load("folder", skeleton)

    Reads what `qfx.save` wrote, or one safetensors file with the state dict of a model that
    `quantize_` or `convert` made. Linears that were int8 or 1-bit are replaced as in these
    functions; everything else takes the tensors of the file in their dtypes. `skeleton` may be on
    the meta device: the float weights of such linears are never created, and memory never holds
    more than the model and one tensor. Tensors are put on the device of the tensor that they
    replace, or on the CPU if that is the meta device.

    Also reads models of other tools, and keeps their integers and scales (docs/importing.md): a
    GGUF file, a folder of compressed-tensors, a safetensors file or state dict of torchao. Two
    arguments apply only to these. `x`: how activations are quantized, None for not at all.
    `requantize`: a Config with `scheme`, `skip` and `only`, for linears that the file stores in a
    format that no linear of qfx can hold. Such linears are dequantized and then quantized as the
    Config says.

    Everything is checked before anything of `skeleton` changes: sizes and SHA-256 of files, names,
    shapes and dtypes of tensors, and that codes, scales and schemes belong together. If another
    process saves into the folder at the same time, either the earlier model or the new one is read.

    Raises ValueError, which names the file and what is wrong, OSError, and NotImplementedError for
    a kind of weight that is not supported yet.
    """
    skeleton = uncompiled_module(skeleton)
    foreign = foreign_of(folder_or_file, skeleton)
    if foreign is None:
        assert not isinstance(folder_or_file, Mapping)
        if x != "file" or requantize is not None:
            raise UserError(
                f"load: {printable(str(folder_or_file))} says itself what its schemes are: x and "
                "requantize are for models of other tools"
            )
        with _opened(Path(folder_or_file)) as saved:
            return _filled(saved, skeleton)
    wanted = None if requantize is None else Config.of(requantize)
    return _filled(imported(foreign, skeleton, x, wanted), skeleton)


def _filled(saved: Saved | Imported, skeleton: nn.Module) -> nn.Module:
    manifest = saved.manifest if isinstance(saved, Saved) else None
    recomputed = {} if manifest else buffers_of(skeleton)
    entries = saved.entries | {
        n: TensorEntry(t.dtype, tuple(t.shape), 0) for n, t in recomputed.items()
    }
    with opened_recurrent(skeleton, lambda name: _has_linears_of(name, entries)):
        return _fitted_and_filled(saved, manifest, entries, recomputed, skeleton)


def _has_linears_of(name: str, entries: Collection[str]) -> bool:
    """Whether entries belong to linears of the recurrent module `name`."""
    return any(entry.startswith((f"{name}.ih", f"{name}.hh")) for entry in entries)


def _fitted_and_filled(
    saved: Saved | Imported,
    manifest: Manifest | None,
    entries: Mapping[str, TensorEntry],
    recomputed: Mapping[str, Tensor],
    skeleton: nn.Module,
) -> nn.Module:
    plan = fitted(
        skeleton, entries, saved.at,
        linears=manifest.linears if manifest else None,
        same=manifest.same if manifest else {},
        derived=manifest.derived if manifest else tuple(recomputed),
    )  # fmt: skip
    tensors = _tensors(saved, plan) if isinstance(saved, Saved) else saved.tensors()
    made, rest = _read(tensors, plan)
    return fill(skeleton, plan, made, {**rest, **recomputed}, saved.at)


@contextmanager
def _opened(path: Path) -> Iterator[Saved]:
    with ExitStack() as files:
        if path.is_dir():
            yield _described(path, files)
        elif path.suffix == ".json":
            if path.name != NAME:
                _refuse_json(path, printable(str(path)))
            yield _described(path.parent, files)
        else:
            yield _alone(path, files)


def _alone(path: Path, files: ExitStack) -> Saved:
    at = printable(str(path))
    file, table = files.enter_context(open_table(path))
    if MARK in table.metadata:
        raise UserError(f"{at} is one file of a saved folder: load the folder that has {NAME}")
    if "qfx_codes" in table.metadata:
        raise UserError(f"{at} holds the codes of a recipe: qfx.Recipe.load reads it")
    return Saved(at, (table,), (file,), None)


def _refuse_json(path: Path, at: str) -> None:
    raw = parsed(bytes_of(path, LARGEST).decode("utf-8", "replace"), at)
    if isinstance(raw, dict) and "qfx_recipe" in raw:
        raise UserError(f"{at} is a recipe, and no model: qfx.Recipe.load reads it")
    raise UserError(f"{at} is no model that qfx.save wrote")


def _described(folder: Path, files: ExitStack) -> Saved:
    """Opens and checks the files of a folder. Starts again if another process replaced the model
    before all files were open."""
    while True:
        read = _description(folder)
        try:
            return _checked(folder, manifest_of(read.data, folder / NAME), files)
        except (UserError, OSError):
            if _description(folder) == read:
                raise
        files.close()


def _description(folder: Path) -> FileSnapshot:
    try:
        return snapshot_of(folder / NAME, LARGEST)
    except FileNotFoundError:
        if not folder.is_dir():
            raise
    hint = ": it looks like a folder of transformers, which from_pretrained reads after "
    raise UserError(
        f"{printable(str(folder))} has no {NAME}, so qfx.save did not write it"
        + (f"{hint}`import qfx.hf`" if (folder / "config.json").exists() else "")
    )


def _checked(folder: Path, manifest: Manifest, files: ExitStack) -> Saved:
    whole = [_whole(folder / name, file, files) for name, file in manifest.files.items()]
    handles, tables = tuple(h for h, _ in whole), tuple(t for _, t in whole)
    for table, file in zip(tables, manifest.files.values(), strict=True):
        if {*table.entries} != {*file.tensors}:
            raise UserError(f"{printable(str(table.path))} does not hold what {NAME} says")
    names = [name for table in tables for name in table.entries]
    if len({*names}) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{printable(str(folder))} has {printable(twice)} in two files")
    return Saved(printable(str(folder / NAME)), tables, handles, manifest)


def _whole(path: Path, file: File, files: ExitStack) -> tuple[BinaryIO, TensorIndex]:
    try:
        size = path.stat().st_size
        if size != file.size:
            raise UserError(
                f"{printable(str(path))} has {size} bytes, and {NAME} says {file.size}: it is not "
                "whole, or of another model"
            )
        return files.enter_context(open_table(path))
    except FileNotFoundError:
        raise UserError(f"{printable(str(path))} is not there, and {NAME} names it") from None


def _read(
    tensors: Iterator[tuple[Path, str, Tensor]], plan: Fitted
) -> tuple[dict[str, Stored], dict[str, Tensor]]:
    """Returns the quantized linears and embeddings by name, each created as soon as all of its
    tensors are read, and all other tensors."""
    made: dict[str, Stored] = {}
    rest: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for path, name, tensor in tensors:
        owner, _, _ = name.rpartition(".")
        if not plan.is_part(name):
            if name not in plan.left:
                rest[name] = tensor.to(plan.device(name))
            continue
        parts[owner][name] = tensor
        if len(parts[owner]) == plan.parts[owner]:
            made[owner] = _linear(parts.pop(owner), owner, plan, path)
        del tensor
    return made, rest


def _tensors(saved: Saved, plan: Fitted) -> Iterator[tuple[Path, str, Tensor]]:
    """Yields the tensors of all files. After the last tensor of a file, raises UserError if the
    SHA-256 of the file differs from the saved one."""
    for table, handle in zip(saved.tables, saved.files, strict=True):
        digest = hashlib.sha256()
        for name, tensor in tensors_of(table, handle, digest.update, plan.is_part):
            yield table.path, name, tensor
            del tensor
        file = _file(saved, table)
        if file and digest.hexdigest() != file.sha256:
            raise UserError(
                f"{printable(str(table.path))} has changed since it was saved: its SHA-256 is "
                f"{digest.hexdigest()}, and {NAME} says {file.sha256}"
            )


def _file(saved: Saved, table: TensorIndex) -> File | None:
    return saved.manifest.files[table.path.name] if saved.manifest else None


def _linear(parts: Mapping[str, Any], owner: str, plan: Fitted, path: Path) -> Stored:
    prefix = f"{owner}."
    module, kind = plan.linears[owner], plan.kinds[owner]
    try:
        found = kind.taken_from(parts, prefix, *size_of(module))
    except ValueError as why:
        raise UserError(f"{printable(str(path))}: {printable(str(why))}") from None
    assert found is not None
    scheme = (plan.schemes or {}).get(owner, found.token)
    if found.token != scheme:
        raise UserError(
            f"{printable(str(path))}: {printable(owner)} is {found.token}, and {NAME} says "
            f"{printable(scheme)}"
        )
    device = plan.device(f"{prefix}weight")
    codes = kind.PARTS[1]
    kept = {name: t if name == codes else t.clone() for name, t in found.tensors.items()}
    moved = {name: tensor.to(device) for name, tensor in kept.items()}
    return made_from(found._replace(tensors=moved), module, kind)
