"""write_text, write_bytes: a file is written beside the old one and then moved, so that there is
always a whole one: the new, or, if the disk is full or the process dies, the old."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path


def write_text(path: str | Path, text: str, mode: int = 0o666) -> None:
    """`write_bytes` of `text` in UTF-8."""
    write_bytes(path, text.encode("utf-8"), mode)


def write_bytes(path: str | Path, data: bytes, mode: int = 0o666) -> None:
    """Replaces the file `path` by one that holds `data`.

    The permissions of a file that is there stay; `mode`, less the umask, are those of a new one.
    What a link points to is replaced, not the link; what is no file, such as a pipe, is written to.
    Raises OSError, with nothing changed.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    partial = target.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        _write(partial, data, mode)
        if target.exists():
            shutil.copymode(target, partial)
        partial.replace(target)
    except OSError as why:
        raise OSError(why.errno, why.strerror, str(path)) from why
    finally:
        partial.unlink(missing_ok=True)


def _write(path: Path, data: bytes, mode: int) -> None:
    """Into a file that was not there, all the way to the disk: a move may overtake what is not."""
    made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(made, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
