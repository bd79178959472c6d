"""The file of codes beside a recipe: recipe.json, recipe.safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from qfx.values.atomic_write import write_bytes
from qfx.values.errors import UserError
from qfx.values.printable import printable

_MARK = {"qfx_codes": "1"}  # version of the file, in its header


def beside(recipe: str | Path) -> Path:
    """The path of the codes: `.safetensors` in the place of `.json`, or behind another name."""
    path = Path(recipe)
    return path.with_name(f"{path.name.removesuffix('.json')}.safetensors")


def write_codes(path: Path, codes: Mapping[str, Tensor]) -> None:
    """Replaces the file as a whole. Raises ValueError rather than write over one that is not of
    this kind, as a model's weights may be, and OSError."""
    library = _safetensors()
    if path.exists() and not _is_ours(path):
        raise UserError(
            f"{path} is there and is no file of a recipe's codes: save the recipe by another name"
        )
    write_bytes(path, library.torch.save(dict(codes), metadata=_MARK))


def read_codes(path: Path) -> dict[str, Tensor]:
    """Raises ValueError for a file that `write_codes` of this version did not write, OSError."""
    library = _safetensors()
    if not path.exists():
        raise UserError(
            f"the recipe has codes in {path}, which is not there: Recipe.save writes two files, "
            "which stay together"
        )
    if not _is_ours(path):
        raise UserError(f"{path} is no file of a recipe's codes, or of another version")
    with library.safe_open(path, "pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


def _is_ours(path: Path) -> bool:
    library = _safetensors()
    try:
        with library.safe_open(path, "pt") as file:
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
