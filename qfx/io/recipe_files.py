"""The two files of a recipe: its JSON, which is replaced last, and the file of codes (weights
rounded to int8) whose name the JSON contains.

While `qfx.save` replaces a model, the JSON temporarily contains two recipes and the digest of
`qfx.json` that decides which of them is valid, so that recipe and model change at the same moment.
See docs/decisions/0036.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from qfx.io.atomic_write import write_bytes
from qfx.io.codes_file import (
    codes_bytes,
    codes_name,
    earlier_name,
    has_codes,
    is_codes_name,
    read_codes,
    remove_codes,
)
from qfx.io.errors import UserError, printable
from qfx.io.folder_lock import locked
from qfx.io.safe_read import bytes_of, parsed, snapshot_of

MODEL = "qfx.json"  # the description of a model that `qfx.save` wrote
LARGEST = 2**28  # largest size in bytes of a JSON file
_ARMS = ("then", "otherwise")
_EITHER = {"qfx_recipe", "model", *_ARMS}  # keys of a JSON with two recipes
log = logging.getLogger(__name__)
Raw = dict[str, Any]
T = TypeVar("T")


class RecipeFiles(NamedTuple):
    """The contents of a recipe's two files. Without rounded weights there is no second file:
    `codes_name` is None."""

    json: bytes
    codes_name: str | None
    codes: bytes


def recipe_files(
    path: Path, codes: Mapping[str, Tensor], text: Callable[[str | None], str]
) -> RecipeFiles:
    """Returns the contents of the files of a recipe. `codes`: its rounded weights. `text`: a
    function that returns the JSON, given the name of the file of codes, or None if there is
    none."""
    data = codes_bytes(codes) if codes else b""
    name = codes_name(path, data) if codes else None
    return RecipeFiles(text(name).encode("utf-8"), name, data)


def save_recipe(path: Path, files: RecipeFiles) -> None:
    """Replaces the recipe at `path`, its JSON last, and removes the file of codes of the earlier
    recipe. Raises OSError; the earlier recipe is then still there."""
    if files.codes_name is None and not has_codes(path):
        write_bytes(path, files.json)
        return
    with locked(path.parent) as alone:
        try:
            if files.codes_name is not None:
                write_bytes(path.with_name(files.codes_name), files.codes, like=path)
            write_bytes(path, files.json)
        finally:
            if alone:
                sweep_codes(path)


def sweep_codes(path: Path) -> None:
    """Removes files of codes that the recipe at `path` does not name; removes none if the recipe
    cannot be read. The caller must hold the lock of the folder."""
    with suppress(OSError, UserError):
        text = current_recipe(path)
        remove_codes(path, set() if text is None else {_named(raw_of(text), path)})


def read_recipe(path: Path, make: Callable[[Raw, Callable[[], Mapping[str, Tensor]]], T]) -> T:
    """Returns the result of `make`, called with the JSON of a recipe and a function that reads its
    file of codes. Starts again if the recipe was replaced meanwhile. Raises UserError and
    OSError."""
    while True:
        read = snapshot_of(path, LARGEST)
        try:
            whole = raw_of(read.data, printable(str(path)))
            raw = _valid(path, whole)
            found = make(raw, cache(partial(_codes, path, raw)))
        except (UserError, OSError):
            if snapshot_of(path, LARGEST) == read:
                raise
            continue
        if raw is whole or snapshot_of(path, LARGEST) == read:
            return found


def current_recipe(path: Path) -> str | None:
    """Returns the JSON of the recipe that is valid at `path`, None if there is none."""
    try:
        data = bytes_of(path, LARGEST)
    except FileNotFoundError:
        return None
    raw = raw_of(data, printable(str(path)))
    return _chosen(path, raw) if _is_one_of_two(raw) else data.decode()


def one_of_two(model: bytes, then: str | None, otherwise: str | None) -> bytes:
    """Returns JSON with two recipes: `then` is valid if the `qfx.json` next to it has the content
    `model`, and `otherwise` if not. None stands for no recipe."""
    digest = hashlib.sha256(model).hexdigest()
    both = {"qfx_recipe": 2, "model": digest, "then": then, "otherwise": otherwise}
    return json.dumps(both).encode()


def settle(path: Path) -> None:
    """Replaces a JSON with two recipes by the one that is valid. If this fails, nothing is lost:
    the next save tries again."""
    try:
        raw = raw_of(bytes_of(path, LARGEST))
        if not _is_one_of_two(raw):
            return
        text = _chosen(path, raw)
        if text is None:
            path.unlink()
        else:
            write_bytes(path, text.encode())
    except FileNotFoundError:
        return
    except (OSError, UserError) as why:
        log.info("%s still holds the recipe of the model before: %s", path, why)


def raw_of(text: str | bytes, at: str = "this") -> Raw:
    """Returns the JSON object of a recipe, checked only for being one. Raises UserError, whose
    message names the file as `at`."""
    try:
        text = text if isinstance(text, str) else text.decode("utf-8")
    except UnicodeDecodeError as why:
        raise UserError(f"{at} is no recipe of qfx: it is no text, {why}") from None
    raw = parsed(text, f"{at} is no recipe of qfx")
    if not isinstance(raw, dict) or raw.get("qfx_recipe") is None:
        raise UserError(f"{at} is no recipe of qfx: it has no qfx_recipe version")
    return raw


def _is_one_of_two(raw: Raw) -> bool:
    return raw.keys() == _EITHER and all(isinstance(raw[k], str | None) for k in _ARMS)


def _valid(path: Path, raw: Raw) -> Raw:
    if not _is_one_of_two(raw):
        return raw
    text = _chosen(path, raw)
    if text is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return raw_of(text)


def _chosen(path: Path, raw: Raw) -> str | None:
    """Returns the JSON of the recipe, out of two, that belongs to the current model; None for no
    recipe."""
    try:
        digest = hashlib.sha256(bytes_of(path.with_name(MODEL), LARGEST)).hexdigest()
    except FileNotFoundError:
        digest = ""
    found: str | None = raw["then"] if raw["model"] == digest else raw["otherwise"]
    return found


def _codes(path: Path, raw: Raw) -> dict[str, Tensor]:
    name = raw.get("codes", earlier_name(path))
    if not is_codes_name(name) and "codes" in raw:
        raise UserError(f"{path}: {printable(repr(name))} is no name of a file of codes beside it")
    return read_codes(path.with_name(name))


def _named(raw: Raw, path: Path) -> str:
    """Returns the name of the file of codes of a recipe; "" if it has none."""
    if "codes" in raw:
        return str(raw["codes"])
    sites = raw.get("sites")
    rounded = isinstance(sites, list) and any(
        isinstance(s, dict) and "rounding" in s for s in sites
    )
    return earlier_name(path) if rounded else ""
