"""write_text, write_bytes, write_files: a file is written beside the old one and then moved, so
that there is always a whole one: the new, or, if the disk is full or the process dies, the old."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

Writer = Callable[[BinaryIO], object]


def write_text(path: str | Path, text: str, mode: int = 0o666) -> None:
    """`write_bytes` of `text` in UTF-8."""
    write_bytes(path, text.encode("utf-8"), mode)


def write_bytes(path: str | Path, data: bytes, mode: int = 0o666) -> None:
    """`write_files` of one file that holds `data`."""
    write_files({Path(path): lambda file: file.write(data)}, mode)


def write_files(files: Mapping[Path, Writer], mode: int = 0o666) -> None:
    """Replaces each of these files by one that its function writes; in this order, and none before
    all are written.

    The permissions of a file that is there stay; `mode`, less the umask, are those of a new one.
    What a link points to is replaced, not the link; what is no file, such as a pipe, is written to.
    Raises OSError, with nothing changed unless moving a file fails.
    """
    partials: dict[Path, Path] = {}
    try:
        for path, write in files.items():
            with _naming(path):
                _prepare(path, write, mode, partials)
        for path, partial in partials.items():
            with _naming(path):
                _move(partial, Path(os.path.realpath(path)))
    finally:
        for partial in partials.values():
            partial.unlink(missing_ok=True)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """What goes wrong is told of the file that was asked for, not of the one beside it."""
    try:
        yield
    except OSError as why:
        raise OSError(why.errno, why.strerror, str(path)) from why


def _prepare(path: Path, write: Writer, mode: int, partials: dict[Path, Path]) -> None:
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        with target.open("wb") as file:
            write(file)
        return
    partials[path] = target.with_name(f".{secrets.token_hex(8)}.partial")
    _write(partials[path], write, mode)


def _move(partial: Path, target: Path) -> None:
    if target.exists():
        shutil.copymode(target, partial)
    partial.replace(target)


def _write(path: Path, write: Writer, mode: int) -> None:
    """Into a file that was not there, all the way to the disk: a move may overtake what is not."""
    made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(made, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
