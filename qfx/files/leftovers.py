"""Removes files that interrupted or replaced saves have left in a folder."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from qfx.files.manifest import MARK, NAME, is_tensor_file_name, read_manifest
from qfx.files.tensor_file import table_of
from qfx.io.atomic_write import remove_partials
from qfx.io.errors import UserError
from qfx.io.recipe_files import sweep_codes


def remove_leftovers(folder: Path, recipe: str) -> None:
    """Removes partial files of dead processes, tensor files that `save` wrote and qfx.json does not
    name, and code files that the recipe does not name. `recipe`: the name of its file.

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
