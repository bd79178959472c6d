"""Replaces files as a whole, so that a reader sees either the old or the new content.

The new content is written to a partial file next to the old one, flushed to the disk, and renamed
over it. Then the folder is flushed, so that the rename itself survives a power failure.

If the process is stopped at any time, the file has either its old or its new content. A killed
process leaves a partial file, which the next write of the same file removes: a writer holds a lock
on its partial file, and the lock ends with its process.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

Writer = Callable[[BinaryIO], object]
_PARTIAL = re.compile(r"\.[0-9a-f]{16}\.partial")
_UNSYNCED = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)  # some file systems cannot sync folders


def write_text(path: str | Path, text: str, mode: int = 0o666) -> None:
    """Replaces a file by `text` in UTF-8, like `write_file`."""
    write_bytes(path, text.encode("utf-8"), mode)


def write_bytes(path: str | Path, data: bytes, mode: int = 0o666, like: Path | None = None) -> None:
    """Replaces a file by `data`, like `write_file`."""
    write_file(Path(path), lambda file: file.write(data), mode, like)


def write_file(path: Path, write: Writer, mode: int = 0o666, like: Path | None = None) -> None:
    """Replaces the content of the file at `path` by the bytes that `write`, called with an open
    file, writes to it.

    The permissions of an existing file, or of `like`, are kept; otherwise they are `mode` less the
    umask. A symbolic link stays, and the file that it points to is replaced. A file that is not
    regular, such as a pipe, is written directly. Raises OSError that names `path`; the file then
    has its old content, unless only flushing the folder failed after the rename.
    """
    with naming(path):
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            with target.open("wb") as file:
                write(file)
            return
        remove_partials(target.parent, target.name)
        with Partial(target, mode) as partial:
            partial.write(write)
            partial.move(target, like)
        sync_folder(target.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Makes an OSError in the `with` block name `path`, which the user passed, instead of a
    temporary file."""
    try:
        yield
    except OSError as why:
        raise OSError(why.errno, why.strerror, str(path)) from why


class Partial:
    """A new file with a temporary name, in the folder of `target`.

    A context manager, which removes the file unless it was moved. It holds a lock on the file that
    ends with the process.
    """

    def __init__(self, target: Path, mode: int = 0o666) -> None:
        self.path, self._file = _created(target, mode)
        self._moved = False

    def __enter__(self) -> Partial:
        return self

    def __exit__(self, *fault: object) -> None:
        if not self._moved:
            with suppress(OSError):  # the next write removes it
                self.path.unlink(missing_ok=True)
        with suppress(OSError):  # flushing the removed file may fail
            self._file.close()

    def write(self, write: Writer) -> None:
        """Calls `write` with the file and flushes it to the disk: a rename may reach the disk
        before data that was not flushed."""
        write(self._file)
        self._file.flush()
        os.fsync(self._file.fileno())

    def move(self, target: Path, like: Path | None = None) -> None:
        """Renames the file to `target`. It gets the permissions of `like`, or of `target`, if that
        exists."""
        like = target if like is None else like
        if like.exists():
            shutil.copymode(like, self.path)
        self.path.replace(target)
        self._moved = True


def _created(target: Path, mode: int) -> tuple[Path, BinaryIO]:
    while True:
        name = f".{_digest(target.name)}{secrets.token_hex(5)}.partial"
        path = target.with_name(name)
        made = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        file = os.fdopen(made, "wb")
        locks = _locked(made)
        if not locks or os.fstat(made).st_nlink:
            return path, file
        file.close()  # another writer removed it before it was locked


def _digest(name: str) -> str:
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:6]


def _locked(opened: int) -> bool:
    """Tries to lock an open file. Returns False if another process has locked it, or if the file
    system has no locks."""
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def remove_partials(folder: Path, name: str | None = None) -> None:
    """Removes partial files of dead processes: only those for the file `name`, or all in the folder
    if it is None. Files that cannot be locked or removed are kept."""
    start = f".{_digest(name)}" if name is not None else "."
    with suppress(OSError):
        for path in [*folder.iterdir()]:
            if path.name.startswith(start) and _PARTIAL.fullmatch(path.name):
                _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    with suppress(OSError):
        opened = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if _locked(opened):
                path.unlink()
        finally:
            os.close(opened)


def sync_folder(folder: Path) -> None:
    """Flushes the names in a folder to the disk, if the file system can. Raises OSError."""
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # a folder that may be written to, but not listed
        return
    try:
        os.fsync(opened)
    except OSError as why:
        if why.errno not in _UNSYNCED:
            raise
    finally:
        os.close(opened)
