"""Reads and writes qfx.json, which describes a saved folder. docs/decisions/0027 and 0036 say
why."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from qfx.io.errors import UserError, printable
from qfx.io.recipe_files import LARGEST, MODEL
from qfx.io.safe_read import bytes_of, parsed

NAME = MODEL
MARK = "qfx_model"
FORMAT = 2  # the format that is written
_FILES = {  # names of tensor files in each format: fixed in qfx 0.2, since then by content
    1: re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors"),
    2: re.compile(r"model-[0-9a-f]{16}\.safetensors"),
}
_SHA256 = re.compile(r"[0-9a-f]{64}")


class File(NamedTuple):
    """A file of tensors: its size in bytes, its SHA-256 in hexadecimal, and the names of its
    tensors."""

    size: int
    sha256: str
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """The description of a saved folder.

    `files`: its files of tensors, by name. `linears`: name of each linear without float weight ->
    text of its scheme. `same`: name in the state dict -> name under which the same tensor is
    stored. `derived`: stored buffers that are not part of the state dict. `recipe`: whether there
    is a `recipe.json`.
    """

    files: Mapping[str, File]
    linears: Mapping[str, str]
    same: Mapping[str, str]
    derived: tuple[str, ...]
    recipe: bool

    def to_json(self) -> str:
        files = {name: file._asdict() for name, file in self.files.items()}
        return json.dumps({MARK: FORMAT, **asdict(self), "files": files}, indent=1) + "\n"


def tensor_file_name(sha256: str) -> str:
    """Returns the name of a tensor file with this digest."""
    return f"model-{sha256[:16]}.safetensors"


def is_tensor_file_name(name: str) -> bool:
    """Whether `save` of this or an earlier version uses such a name."""
    return any(names.fullmatch(name) for names in _FILES.values())


def read_manifest(folder: Path) -> Manifest:
    """Reads the qfx.json of a folder. Raises UserError like `manifest_of`, and OSError."""
    return manifest_of(bytes_of(folder / NAME, LARGEST), folder / NAME)


def manifest_of(data: bytes, path: Path) -> Manifest:
    """Parses the content of a qfx.json. Raises UserError, which names the file and what is wrong,
    for content that `to_json` of this or an earlier version did not write."""
    at = printable(str(path))
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as why:
        raise UserError(f"{at} is no text: {why}") from None
    raw = parsed(text, at)
    form = raw.get(MARK) if isinstance(raw, dict) else None
    if form is None:
        raise UserError(f"{at} is no description of a model: it has no {MARK}")
    if type(form) is not int or form not in _FILES:
        raise UserError(
            f"{at} has format {printable(repr(form))}, and this qfx reads formats "
            f"{' and '.join(map(str, _FILES))}: use the qfx that saved it, or a newer one"
        )
    if wrong := raw.keys() ^ {MARK, *Manifest.__dataclass_fields__}:
        raise UserError(f"{at}: {printable(repr(sorted(wrong)))} is missing or not known")
    fields = {field: _FIELDS[field](raw[field], f"{at}: {field}") for field in _FIELDS}
    for name in fields["files"]:
        if not _FILES[form].fullmatch(name):
            raise UserError(f"{at}: {printable(name)} is no name of a file of a saved model")
    return Manifest(**fields)


def _files(raw: Any, at: str) -> dict[str, File]:
    found = {}
    for name, entry in _object(raw, at).items():
        here = f"{at}: {printable(name)}"
        if not isinstance(entry, dict) or {*entry} != {*File._fields}:
            raise UserError(f"{here} does not have {', '.join(File._fields)}")
        size, sha256 = entry["size"], entry["sha256"]
        if type(size) is not int or not 0 <= size < 2**63:
            raise UserError(f"{here}: {printable(repr(size))} is no size")
        if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
            raise UserError(f"{here}: {printable(repr(sha256))} is no SHA-256")
        found[name] = File(size, sha256, _names(entry["tensors"], here))
    return found


def _object(raw: Any, at: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise UserError(f"{at} is no object of JSON")
    return raw


def _texts(raw: Any, at: str) -> dict[str, str]:
    for name, text in _object(raw, at).items():
        if not isinstance(text, str):
            raise UserError(f"{at}: {printable(name)} is {printable(repr(text))}, which is no text")
    return dict(raw)


def _names(raw: Any, at: str) -> tuple[str, ...]:
    if not isinstance(raw, list) or not all(isinstance(name, str) for name in raw):
        raise UserError(f"{at} is no list of names")
    if len({*raw}) != len(raw):
        raise UserError(f"{at} has a name twice")
    return tuple(raw)


def _yes_no(raw: Any, at: str) -> bool:
    if not isinstance(raw, bool):
        raise UserError(f"{at} is {printable(repr(raw))}, which is neither true nor false")
    return raw


_FIELDS: dict[str, Callable[[Any, str], Any]] = {
    "files": _files,
    "linears": _texts,
    "same": _texts,
    "derived": _names,
    "recipe": _yes_no,
}
