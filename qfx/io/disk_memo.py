"""DiskMemo: values that one process makes and later ones read from disk, under one discipline.

- Where: the folder that the variable `QFX_<KIND>_CACHE` of the environment names, or one of the
  user's own; with `0` in the variable nowhere, without a word.
- A folder that cannot be made, or that others could write to, is a warning, once for each reason,
  and so is a disk that refuses to be written. Every process then makes its own values.
- A file that is damaged, could be another user's or does not hold what was written is a warning;
  the value is made anew and replaces it. That there is no file is no message.
- What cannot be kept although there is a folder (`NotCached`) is logged at level INFO, with why.
- Beyond `most` files those go that were not used for longest (qfx/io/disk_cache.py).
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
    """Why a value is not kept."""


class MemoEntry(Protocol[T]):
    """One value: its key, its format, and how it is made."""

    def key(self) -> str:
        """The name of its file. Raises NotCached. It is called first."""
        ...

    def read(self, data: bytes) -> T | None:
        """The value that `written` has written; None where it has to be made again. Raises
        ValueError, KeyError, TypeError or RecursionError for any other data."""
        ...

    def make(self) -> T: ...

    def written(self, value: T) -> bytes:
        """Raises NotCached."""
        ...


@dataclass(frozen=True)
class DiskMemo:
    """The values of a kind. `kind`: a word. `what`: the same in messages, in the plural. `folder`:
    in that of the user. `names`: those of its files."""

    kind: str
    what: str
    folder: str
    names: re.Pattern[str]
    most: int
    log: logging.Logger

    @property
    def switch(self) -> str:
        """The environment variable that says where, or '0' for nowhere."""
        return f"QFX_{self.kind.upper()}_CACHE"

    def cache(self) -> DiskCache | None:
        """Returns the folder of the files, or None where keeping is off or fails."""
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
        """The value from disk, or made now and kept there."""
        cache = self.cache()
        if cache is None:
            return entry.make()
        try:
            key = entry.key()
        except NotCached as why:
            self.log.info("%s are not kept on disk: %s", self.what, why)
            return entry.make()
        found = self._read(cache, key, entry)
        if found is not None:
            self.log.info("read from %s", cache.folder / key)
            return found
        made = entry.make()
        self._write(cache, key, entry, made)
        return made

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
    """Whether an environment variable says where values are kept, and nothing of the values."""
    return _SWITCH.fullmatch(name) is not None


@lru_cache
def _warn(log: logging.Logger, what: str, why: str) -> None:
    """Once for each reason."""
    log.warning("%s are not kept on disk: %s", what, why)
