"""DiskCache: files with results that can be computed again, in a folder that no other user can
write to.

A file `<key>` contains a line with the format and the SHA-256 of key and data, followed by the
data. The only symbolic link that is followed is one to the folder, if it belongs to the user. A
link, a pipe or a file of another user that has the name of a key is not read, and the next write
replaces it.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_STALE = 3600  # seconds after which a partial file is considered abandoned
_PARTIAL = re.compile(r"\.[0-9a-f]{16}\.partial")
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a pipe does not wait
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def user_folder() -> Path:
    """Returns `$XDG_CACHE_HOME/qfx` or `~/.cache/qfx`; creates the folder if necessary and removes
    other users' permission to write to it.

    Raises OSError if it cannot be created or its permissions cannot be changed, or if the user has
    no home directory.
    """
    folder = _user_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    if about.st_uid == os.geteuid() and about.st_mode & _OTHERS:
        folder.chmod(0o700)
    return folder


def cached_files() -> tuple[Path, list[Path]]:
    """Returns the folder of `user_folder`, which is not created, and the files in it."""
    folder = _user_folder()
    return folder, [path for path in folder.rglob("*") if path.is_file()]


def remove_cached_files() -> None:
    """Removes the folder of `user_folder` with all that is in it; of a link, the link. Processes
    that use it compute again what they read from it. Raises OSError if the system refuses."""
    folder = _user_folder()
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def _user_folder() -> Path:
    home = os.path.expanduser("~")  # stays "~" for a user without a home, as in some containers
    cache = os.environ.get("XDG_CACHE_HOME") or (home != "~" and os.path.join(home, ".cache"))
    if not cache:
        raise OSError("the user has no home directory, and XDG_CACHE_HOME is not set")
    return Path(cache) / "qfx"


@dataclass(frozen=True)
class DiskCache:
    """A cache of at most `most` files in `folder`, whose names match `names`.

    A write beyond `most` removes the files that were not read or written for the longest time.
    Several processes may use one folder at once. Creating an instance creates the folder. The
    constructor, `read` and `write` raise ValueError if another user could change the content of the
    folder, and OSError if the system refuses.
    """

    folder: Path
    names: re.Pattern[str]
    most: int

    def __post_init__(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._opened():
            pass

    def read(self, key: str) -> bytes:
        """Returns the data last written under this key. Raises FileNotFoundError if there is none,
        and ValueError for a file that is damaged or could have been written by another user."""
        with self._opened() as folder, os.fdopen(self._open(key, folder), "rb") as file:
            about = os.fstat(file.fileno())
            own = stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid()
            if not own or about.st_mode & _OTHERS:
                raise ValueError(f"{self.folder / key} could have been written by another user")
            with suppress(OSError):  # for example on a read-only disk
                os.utime(file.fileno())  # the time of its last use
            found = file.read()
        data = found.partition(b"\n")[2]
        if found != _framed(key, data):
            raise ValueError(f"{self.folder / key} is cut off, damaged or a file of another key")
        return data

    def write(self, key: str, data: bytes) -> None:
        """Stores the data under this key, in one step. Whatever file has the name of the key is
        replaced."""
        partial = f".{secrets.token_hex(8)}.partial"
        with self._opened() as folder:
            try:
                with os.fdopen(os.open(partial, _CREATE, 0o600, dir_fd=folder), "wb") as file:
                    file.write(_framed(key, data))
                os.replace(partial, key, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                _remove(partial, folder)
                raise
            self._evict(folder)

    def _open(self, key: str, folder: int) -> int:
        try:
            return os.open(key, _READ, dir_fd=folder)
        except OSError as why:  # its message names the file without its folder
            raise OSError(why.errno, why.strerror, str(self.folder / key)) from why

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Yields a descriptor of the folder. Owner and mode are checked on the descriptor, so they
        belong to the folder that is read and written, even if the path meanwhile refers to another
        folder."""
        link = self.folder.lstat()
        opened = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            about, user = os.fstat(opened), os.geteuid()
            for owner in (link.st_uid, about.st_uid):
                if owner != user:
                    raise ValueError(f"{self.folder} belongs to user {owner}, not to user {user}")
            if about.st_mode & _OTHERS:
                mode = stat.S_IMODE(about.st_mode)
                raise ValueError(f"other users may write to {self.folder}: its mode is {mode:o}")
            yield opened
        finally:
            os.close(opened)

    def _evict(self, folder: int) -> None:
        """Removes partial files of processes that died, and the oldest files beyond `most`."""
        kept, now = [], time.time()
        for name in os.listdir(folder):
            with suppress(FileNotFoundError):  # other processes may be doing the same
                about = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if stat.S_ISDIR(about.st_mode):
                    continue
                if _PARTIAL.fullmatch(name) and now - about.st_mtime > _STALE:
                    _remove(name, folder)
                elif self.names.fullmatch(name):
                    kept.append((about.st_mtime, name))
        for _, name in sorted(kept)[: -self.most]:
            _remove(name, folder)


def _framed(key: str, data: bytes) -> bytes:
    digest = hashlib.sha256(key.encode() + b"\0" + data).hexdigest()
    return f"qfx cache 1 {digest}\n".encode() + data


def _remove(name: str, folder: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
