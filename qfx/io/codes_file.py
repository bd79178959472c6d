"""Reads and writes the second file of a recipe, which contains its weights rounded to int8 (codes).

It is called `recipe-<16 hexadecimal digits of its SHA-256>.safetensors` and is next to
`recipe.json`, which contains this name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from qfx.io.errors import UserError, printable
from qfx.io.safe_read import missing_as_os_error, opened

_MARK = {"qfx_codes": "1"}  # version of the file, in its header


def earlier_name(recipe: Path) -> str:
    """Returns the name of the file of codes in qfx 0.2: `recipe.safetensors` next to
    `recipe.json`."""
    return f"{_stem(recipe)}.safetensors"


def codes_name(recipe: Path, data: bytes) -> str:
    """Returns the name of the file of codes with the content `data`, for the recipe at this
    path."""
    return f"{_stem(recipe)}-{hashlib.sha256(data).hexdigest()[:16]}.safetensors"


def is_codes_name(name: Any) -> bool:
    """Whether `name` is a valid name of a file of codes, as the JSON of a recipe may contain it. A
    name that leads out of the recipe's folder is not."""
    return isinstance(name, str) and _CODES.fullmatch(name) is not None


_CODES = re.compile(r"[^/\0]*-[0-9a-f]{16}\.safetensors")


def _stem(recipe: Path) -> str:
    return recipe.name.removesuffix(".json")


def codes_bytes(codes: Mapping[str, Tensor]) -> bytes:
    """Returns the content of a file with these codes (int8 weights). Raises ImportError without the
    package safetensors."""
    return bytes(_safetensors().torch.save(dict(codes), metadata=_MARK))


def read_codes(path: Path) -> dict[str, Tensor]:
    """Reads a file of codes; returns int8 weights by name. Raises ValueError for a file with other
    content than `codes_bytes` of this version makes, and OSError."""
    library = _safetensors()
    if not path.exists():
        raise UserError(
            f"the recipe has codes in {path}, which is not there: Recipe.save writes two files, "
            "which stay together"
        )
    opened(path).close()  # raises for a pipe, for which the library would wait
    if not _is_ours(path):
        raise UserError(f"{path} is no file of a recipe's codes, or of another version")
    with missing_as_os_error(path), library.safe_open(path, "pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


def has_codes(recipe: Path) -> bool:
    """Whether a file of codes of this recipe, or of an earlier recipe at its path, exists, judging
    by names."""
    return bool(_files(recipe))


def remove_codes(recipe: Path, keep: Container[str]) -> None:
    """Removes the files of codes that belong to earlier recipes at the path `recipe`, except those
    with a name in `keep`. Files that qfx did not write are kept, and so are those that cannot be
    removed."""
    for path in _files(recipe):
        if path.name not in keep:
            with suppress(OSError, UserError, ImportError):
                opened(path).close()
                if _is_ours(path):
                    path.unlink()


def _files(recipe: Path) -> list[Path]:
    """Returns the files of codes of this recipe and of earlier recipes at its path. A file that
    belongs to another recipe, whose name ends like a digest, is left out."""
    name = re.compile(rf"{re.escape(_stem(recipe))}(-[0-9a-f]{{16}})?\.safetensors")
    with suppress(OSError):
        found = [path for path in recipe.parent.iterdir() if name.fullmatch(path.name)]
        earlier = recipe.with_name(earlier_name(recipe))
        return [p for p in found if p == earlier or not p.with_suffix(".json").exists()]
    return []


def _is_ours(path: Path) -> bool:
    library = _safetensors()
    try:
        with missing_as_os_error(path), library.safe_open(path, "pt") as file:
            return bool(file.metadata() == _MARK)
    except library.SafetensorError as why:
        raise UserError(
            f"{path} is no whole file of a recipe's codes: {printable(str(why))}"
        ) from None


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise ImportError(
            "the codes of a recipe are kept in a safetensors file, which needs the package "
            'safetensors: pip install "qfx[rounding]" brings it'
        ) from None
    return safetensors
