"""Reads untrusted files: no path (a pipe, a device) can make qfx wait or read forever, and JSON is
parsed strictly."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from qfx.io.errors import UserError, printable

_KINDS = {
    stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}  # fmt: skip


def opened(path: str | Path) -> BinaryIO:
    """Opens a regular file for reading; links are followed. Raises UserError for a pipe, a device
    or a socket, without opening it, and OSError for a missing file or a folder."""
    _check_regular(os.stat(path).st_mode, path)
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(number, "rb")
    try:
        _check_regular(os.fstat(number).st_mode, path)  # it may have been replaced since
    except (OSError, UserError):
        file.close()
        raise
    return file


def _check_regular(mode: int, path: str | Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no file")
        raise UserError(f"{printable(str(path))} is {kind}, expected a regular file")


def first_bytes(file: BinaryIO, count: int) -> bytes:
    """Reads the first bytes of an open file. Reads none if its size is 0, because reading files of
    the system, such as those in /proc, may wait."""
    return file.read(min(count, os.fstat(file.fileno()).st_size))


class FileSnapshot(NamedTuple):
    """The content of a file, with values that distinguish the file from a later one of the same
    name and content."""

    data: bytes
    inode: int
    modified: int  # nanoseconds


def bytes_of(path: str | Path, most: int) -> bytes:
    """Returns the content of a regular file of at most `most` bytes. Raises the errors of `opened`,
    and UserError for a larger file."""
    return snapshot_of(path, most).data


def snapshot_of(path: str | Path, most: int) -> FileSnapshot:
    """Reads a file like `bytes_of`; also returns values that identify the file."""
    with opened(path) as file:
        about = os.fstat(file.fileno())
        if about.st_size > most:
            raise UserError(
                f"{printable(str(path))} has {about.st_size} bytes, and at most {most} are read"
            )
        return FileSnapshot(file.read(about.st_size), about.st_ino, about.st_mtime_ns)


@contextmanager
def missing_as_os_error(path: Path) -> Iterator[None]:
    """Turns PyTorch's RuntimeError for a missing file into FileNotFoundError. safetensors opens a
    file twice, and it may be removed in between."""
    try:
        yield
    except RuntimeError as why:
        raise FileNotFoundError(errno.ENOENT, printable(str(why)), str(path)) from why


def inside(folder: Path, name: str) -> Path:
    """Returns the path of a file whose `name` is given in a description in `folder`. Raises
    UserError for a name that leads out of the folder: an absolute path, one with `..`, or a
    link."""
    path = folder / relative(name, printable(str(folder)))
    real = Path(os.path.realpath(path))
    if Path(os.path.realpath(folder)) not in real.parents:
        raise UserError(
            f"{printable(str(folder))} names {printable(repr(name))}, a link that leads out of it"
        )
    return path


def relative(name: str, at: str) -> Path:
    """Returns the relative path `name`, which a description of a model contains. Raises UserError
    for a path that leads out of the folder; `at` is the name of the description in its message."""
    path = Path(name)
    if not name or "\0" in name or path.is_absolute() or ".." in path.parts:
        raise UserError(
            f"{at} names {printable(repr(name))}, which is no file inside of its folder: files of "
            "a model may name nothing else"
        )
    return path


def parsed(text: str, refusal: str) -> Any:
    """Parses a JSON text. Raises UserError, whose message begins with `refusal`, for invalid JSON,
    for text that is nested too deeply, and for an object with a repeated key."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(key for key, _ in pairs)
        if twice := [key for key, count in counts.items() if count > 1]:
            raise UserError(f"{refusal}: {twice[0]!r} stands twice in one object")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as why:
        raise UserError(f"{refusal}: it is not JSON, {why}") from None
    except RecursionError:
        raise UserError(f"{refusal}: it is nested too deeply") from None
    except UserError:
        raise
    except ValueError as why:  # a number of thousands of digits
        raise UserError(f"{refusal}: {why}") from None
