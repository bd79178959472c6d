"""Finds the installed package (distribution) that a Python module belongs to, and its fingerprint.

A distribution is found next to the module's file, whichever folder that is: a virtual environment
on top of another one, `pip install --target` and the user's own folder of packages all work. Its
RECORD lists the installed files with their checksums. Files that no RECORD lists (a project, an
editable install, a file that was copied into site-packages) may change at any time.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from importlib.metadata import Distribution, distributions
from pathlib import Path
from types import ModuleType

_PACKAGES = ("site-packages", "dist-packages")


def identity(module: ModuleType) -> str:
    """Returns a text that identifies the installed code of a module; '' for one that is not
    installed.

    For the standard library this is the version of Python. For others it contains the names and
    versions of the distributions of the top-level package and digests of their RECORDs. A module
    without a file belongs to its top-level package. A module that was created at run time is not
    installed.
    """
    top = sys.modules.get(module.__name__.partition(".")[0])
    file = getattr(module, "__file__", None) or getattr(top, "__file__", None)
    if file is not None:
        return f"Python {sys.version}" if _is_standard(file) else _of_file(file)
    empty = hasattr(module, "__path__")  # a namespace: its modules have files
    return f"Python {sys.version}" if empty or module.__name__ in sys.builtin_module_names else ""


@lru_cache
def _is_standard(file: str) -> bool:
    """Whether a file belongs to the standard library, whose folder may also contain
    site-packages."""
    places = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    below = any(Path(file).is_relative_to(place) for place in places if place)
    return below and not any(part in _PACKAGES for part in Path(file).parts)


@lru_cache
def _of_file(file: str) -> str:
    path = Path(file)
    tops = ((folder, path.relative_to(folder).parts[0]) for folder in path.parents)
    found = (_installed(str(folder)).get(top.partition(".")[0], "") for folder, top in tops)
    return next(filter(None, found), "")


@lru_cache
def _installed(folder: str) -> dict[str, str]:
    """Returns for each top-level package the distributions of this folder that contain it."""
    found = defaultdict(list)
    for distribution in distributions(path=[folder]):
        record = distribution.read_text("RECORD")
        if record is None and Path(folder).name not in _PACKAGES:
            continue  # an egg-info next to the sources of a project
        digest = hashlib.sha256("\n".join(_files(record)).encode()).hexdigest()[:32]
        for top in {*_tops(distribution, record)}:
            found[top].append(f"{distribution.name} {distribution.version} {digest}")
    return {top: ", ".join(sorted(texts)) for top, texts in found.items()}


def _tops(distribution: Distribution, record: str | None) -> Iterator[str]:
    """Yields the top-level packages of a distribution. Packages of Linux distributions may have no
    RECORD."""
    if record is None:
        names = distribution.read_text("top_level.txt") or distribution.name.replace("-", "_")
        yield from names.split()
    for line in _files(record):
        yield line.partition(",")[0].partition("/")[0].partition(".")[0]


def _files(record: str | None) -> list[str]:
    """Returns the sorted lines `path,checksum,size` of a RECORD. Lines of files outside of the
    packages' folder are left out, since the content of such scripts depends on that folder."""
    return sorted(line for line in (record or "").splitlines() if not line.startswith(".."))
