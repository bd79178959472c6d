"""Files that are replaced as a whole: the new content is written to a partial file beside the old
one, flushed to the disk, and renamed over it; then the folder is flushed, so that the rename itself
survives a power cut.

Whatever stops the process, the file has either its old or its new content. A process that is killed
leaves a partial file, which the next write of the same file removes: a writer holds a lock on its
partial file, and a lock ends with its process.
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
_UNSYNCED = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)  # folders of some file systems


def write_text(path: str | Path, text: str, mode: int = 0o666) -> None:
    """`write_file` of `text` in UTF-8."""
    write_bytes(path, text.encode("utf-8"), mode)


def write_bytes(path: str | Path, data: bytes, mode: int = 0o666, like: Path | None = None) -> None:
    """`write_file` of `data`."""
    write_file(Path(path), lambda file: file.write(data), mode, like)


def write_file(path: Path, write: Writer, mode: int = 0o666, like: Path | None = None) -> None:
    """Replaces a file by what `write` writes.

    The permissions of a file that exists, or of `like`, are kept; without one they are `mode` less
    the umask. A
    symbolic link stays, and the file that it points to is replaced. What is not a regular file,
    such as a pipe, is written to directly. Raises OSError that names `path`; the file then has its
    old content, unless the folder alone could not be flushed after the rename.
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
    """An OSError inside names `path`, which the user asked for, and not a partial file."""
    try:
        yield
    except OSError as why:
        raise OSError(why.errno, why.strerror, str(path)) from why


class Partial:
    """A new file beside `target`, under a name of its own. A context manager, which removes the
    file unless it was moved, and holds a lock on it that ends with the process."""

    def __init__(self, target: Path, mode: int = 0o666) -> None:
        self.path, self._file = _created(target, mode)
        self._moved = False

    def __enter__(self) -> Partial:
        return self

    def __exit__(self, *fault: object) -> None:
        if not self._moved:
            with suppress(OSError):  # the next write removes it
                self.path.unlink(missing_ok=True)
        with suppress(OSError):  # of what was not flushed, and is gone
            self._file.close()

    def write(self, write: Writer) -> None:
        """Flushes to the disk what `write` writes: a rename may overtake what is not flushed."""
        write(self._file)
        self._file.flush()
        os.fsync(self._file.fileno())

    def move(self, target: Path, like: Path | None = None) -> None:
        """Renames it to `target`. It takes the permissions of `like`, or `target`, where that
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
    """Whether the file could be locked: not if another process has, or the file system cannot."""
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def remove_partials(folder: Path, name: str | None = None) -> None:
    """Removes the partial files of processes that have died: those for the file `name`, or all of
    the folder. Leaves what it cannot lock or remove."""
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
    """Flushes the names in a folder to the disk, where its file system can. Raises OSError."""
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
