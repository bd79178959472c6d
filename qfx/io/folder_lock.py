"""A lock of a folder, for writers that replace several of its files."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qfx.io.atomic_write import naming, sync_folder

LOCK = ".qfx.lock"  # an empty file that is never removed, which would let a second writer in
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.ENOLCK, errno.EBADF)
log = logging.getLogger(__name__)


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Waits until no other process or thread holds the lock of the folder, and holds it in the
    `with` block.

    Yields False if the file system has no locks (some network file systems): then files may be
    added and renamed, but a file that another writer may be about to name must not be removed.
    Raises OSError that names the folder if the lock file cannot be created.
    """
    with naming(folder):
        opened = _opened(folder / LOCK)
    try:
        has_lock = _hold(opened, folder)
        try:
            yield has_lock
        finally:
            if has_lock:
                with suppress(OSError):  # closing it releases it too, unless a fork has it
                    fcntl.flock(opened, fcntl.LOCK_UN)
    finally:
        os.close(opened)


def _opened(path: Path) -> int:
    flags = os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, os.O_RDWR | flags, 0o666)  # NFS only locks files opened for writing
    except PermissionError:
        return os.open(path, os.O_RDONLY | flags, 0o666)


def _hold(opened: int, folder: Path) -> bool:
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process that writes to %s", folder)
            fcntl.flock(opened, fcntl.LOCK_EX)
    except OSError as why:
        if why.errno not in _NO_LOCKS:
            raise OSError(why.errno, why.strerror, str(folder)) from why
        log.warning("%s has no locks (%s): files of earlier saves are left there", folder, why)
        return False
    return True


def made_folder(folder: Path) -> None:
    """Creates a folder and its parents, and flushes each new name to the disk."""
    missing = [f for f in (folder, *folder.parents) if not f.exists()]
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for each in missing:
            sync_folder(each.parent)
