"""Builds that several test files need, while these run in several processes."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock


def one_process(folder: Path) -> FileLock:
    """Held by the process that builds in `folder`; the others wait and find it built."""
    folder.parent.mkdir(exist_ok=True)
    return FileLock(folder.with_suffix(".lock"))
