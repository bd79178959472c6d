"""DiskMemo: a cache on disk for values that one process computes and later ones read.

- The folder is given by the environment variable `QFX_<KIND>_CACHE`, or is one of the user's own.
  With `0` in the variable nothing is stored, without a message.
- A folder that cannot be created, or that other users could write to, causes a warning, once for
  each reason, and so does a failing write. Every process then computes its own values.
- A file that is damaged, could be from another user or has unexpected content causes a warning; the
  value is computed again and replaces it. A missing file causes no message.
- A value that cannot be stored (`NotCached`) is logged at level INFO, with the reason.
- Beyond `most` files, those not used for the longest time are removed (qfx/io/disk_cache.py).
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol, TypeVar

from qfx.io.disk_cache import DiskCache, user_folder

T = TypeVar("T")
_SWITCH = re.compile(r"QFX_[A-Z]+_CACHE")


class NotCached(Exception):
    """Raised if a value cannot be stored, with the reason."""


class MemoEntry(Protocol[T]):
    """One value of a disk cache: its key, its format, and how it is computed."""

    def key(self) -> str:
        """Returns the name of the file of the value. It is called before the other methods. Raises
        NotCached."""
        ...

    def read(self, data: bytes) -> T | None:
        """Returns the value that is stored as `data`, the result of `written`; None if it must be
        computed again. Raises ValueError, KeyError, TypeError or RecursionError for any other
        data."""
        ...

    def make(self) -> T: ...

    def written(self, value: T) -> bytes:
        """Returns the data to store for a value. Raises NotCached."""
        ...


@dataclass(frozen=True)
class DiskMemo:
    """The disk cache for values of one kind.

    `kind`: the middle of the environment variable `QFX_<KIND>_CACHE`. `what`: a plural noun for the
    values, for messages. `folder`: the name of the subfolder of the user's cache folder. `names`:
    the pattern of the file names. `most`: the largest number of files.
    """

    kind: str
    what: str
    folder: str
    names: re.Pattern[str]
    most: int
    log: logging.Logger

    @property
    def switch(self) -> str:
        """The name of the environment variable that contains the folder, or '0' to store
        nothing."""
        return f"QFX_{self.kind.upper()}_CACHE"

    def cache(self) -> DiskCache | None:
        """Returns the folder of the files as a DiskCache; None if storing is switched off, or if
        the folder cannot be used, which causes a warning."""
        chosen = os.environ.get(self.switch, "")
        if chosen == "0":
            return None
        try:
            folder = Path(chosen) if chosen else user_folder() / self.folder
            return DiskCache(folder, self.names, self.most)
        except (OSError, ValueError) as why:
            _warn(self.log, self.what, str(why))
            return None

    def get(self, entry: MemoEntry[T]) -> T:
        """Returns the value from disk, or computes and stores it."""
        cache, key = self._place(entry)
        found = self._found(cache, key, entry)
        if found is not None:
            return found
        made = entry.make()
        if cache is not None:
            self._write(cache, key, entry, made)
        return made

    def find(self, entry: MemoEntry[T]) -> T | None:
        """Returns the value from disk, or None if it must be computed."""
        return self._found(*self._place(entry), entry)

    def put(self, entry: MemoEntry[T], value: T) -> None:
        """Stores the value on disk and replaces an existing one."""
        cache, key = self._place(entry)
        if cache is not None:
            self._write(cache, key, entry, value)

    def _place(self, entry: MemoEntry[T]) -> tuple[DiskCache | None, str]:
        cache = self.cache()
        try:
            return cache, entry.key() if cache is not None else ""
        except NotCached as why:
            self.log.info("%s are not kept on disk: %s", self.what, why)
            return None, ""

    def _found(self, cache: DiskCache | None, key: str, entry: MemoEntry[T]) -> T | None:
        found = None if cache is None else self._read(cache, key, entry)
        if cache is not None and found is not None:
            self.log.info("read from %s", cache.folder / key)
        return found

    def _read(self, cache: DiskCache, key: str, entry: MemoEntry[T]) -> T | None:
        try:
            return entry.read(cache.read(key))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as why:
            self.log.warning("%s are made anew: %s", self.what, why)
            return None

    def _write(self, cache: DiskCache, key: str, entry: MemoEntry[T], made: T) -> None:
        try:
            cache.write(key, entry.written(made))
        except NotCached as why:
            self.log.info("%s are not kept on disk: %s", self.what, why)
        except (OSError, ValueError) as why:
            _warn(self.log, self.what, str(why))


def is_switch(name: str) -> bool:
    """Whether an environment variable only selects the folder of a disk cache, so that it does not
    change any result."""
    return _SWITCH.fullmatch(name) is not None


@lru_cache
def _warn(log: logging.Logger, what: str, why: str) -> None:
    """Logs a warning, once for each reason."""
    log.warning("%s are not kept on disk: %s", what, why)
