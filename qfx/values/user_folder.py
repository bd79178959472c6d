"""The folder of the user's own in which qfx keeps what it has found out, and files in it.

Nothing is read that another user could have written, and nothing written where one could.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def user_folder() -> Path:
    """`<cache>/qfx`. OSError, with the reason, where there is none, none can be made, or it is
    another user's."""
    home = os.path.expanduser("~")  # stays "~" for a user without a home, as in some containers
    cache = os.environ.get("XDG_CACHE_HOME") or (home != "~" and os.path.join(home, ".cache"))
    if not cache:
        raise OSError("the user has no home directory, and XDG_CACHE_HOME is not set")
    folder = Path(cache) / "qfx"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if {folder.lstat().st_uid, folder.stat().st_uid} != {os.geteuid()}:
        raise OSError(f"{folder} belongs to another user")
    if folder.stat().st_mode & _OTHERS:
        folder.chmod(0o700)
    return folder


def own_bytes(path: Path) -> bytes:
    """Raises ValueError for what another user could have written, and never waits for a pipe."""
    opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(opened, "rb") as file:
        about = os.fstat(opened)
        own = stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid()
        if not own or about.st_mode & _OTHERS:
            raise ValueError(f"{path} could have been written by another user")
        with suppress(OSError):  # as on a disk that is only read
            os.utime(opened)  # when it was last of use
        return file.read()
