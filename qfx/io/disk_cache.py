"""DiskCache: files in a folder that no other user can write to, for results that can be made again.

A file `<key>` holds a line with the format and the SHA-256 of key and data, and then the data. No
symbolic link is followed but one to the folder that is the user's own: a link, a pipe or a file of
another user in the place of a key is not read, and the next write replaces it.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_STALE = 3600  # seconds after which nobody is still writing a partial file
_PARTIAL = re.compile(r"\.[0-9a-f]{16}\.partial")
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a pipe does not wait
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def user_folder() -> Path:
    """`$XDG_CACHE_HOME/qfx` or `~/.cache/qfx`, made where it is missing and closed to other users.

    Raises OSError where it cannot be made or closed, or the user has no home directory.
    """
    home = os.path.expanduser("~")  # stays "~" for a user without a home, as in some containers
    cache = os.environ.get("XDG_CACHE_HOME") or (home != "~" and os.path.join(home, ".cache"))
    if not cache:
        raise OSError("the user has no home directory, and XDG_CACHE_HOME is not set")
    folder = Path(cache) / "qfx"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    if about.st_uid == os.geteuid() and about.st_mode & _OTHERS:
        folder.chmod(0o700)
    return folder


@dataclass(frozen=True)
class DiskCache:
    """The files of `folder` whose names match `names`: at most `most`, beyond which a write removes
    those that were not read or written for longest. Several processes may use one folder at once.

    Making one makes the folder. That, `read` and `write` raise ValueError where another user could
    change what is in the folder, and OSError where the system refuses.
    """

    folder: Path
    names: re.Pattern[str]
    most: int

    def __post_init__(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._opened():
            pass

    def read(self, key: str) -> bytes:
        """The data last written under this key. Raises FileNotFoundError where there is none, and
        ValueError for a file that is damaged or could be another user's."""
        with self._opened() as folder, os.fdopen(self._open(key, folder), "rb") as file:
            about = os.fstat(file.fileno())
            own = stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid()
            if not own or about.st_mode & _OTHERS:
                raise ValueError(f"{self.folder / key} could have been written by another user")
            with suppress(OSError):  # as on a disk that is only read
                os.utime(file.fileno())  # the time of its last use
            found = file.read()
        data = found.partition(b"\n")[2]
        if found != _framed(key, data):
            raise ValueError(f"{self.folder / key} is cut off, damaged or a file of another key")
        return data

    def write(self, key: str, data: bytes) -> None:
        """Replaces whatever has the key's name by a file of this data, all at once."""
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
        except OSError as why:  # which names the file without its folder
            raise OSError(why.errno, why.strerror, str(self.folder / key)) from why

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """A descriptor of the folder, whose owner and mode are those of the very folder that is
        then read and written, whatever its path leads to by then."""
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
