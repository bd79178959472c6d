"""Mutant: a planted defect as a value, and the place in a tree where it goes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = {".cpp", ".h", ".inc"}


@dataclass(frozen=True)
class Mutant:
    """`old`, which occurs once in the sources, becomes `new`, and one of `tests` must fail.

    `tests`: names of test functions, wherever they are defined; `name[a, b]` are those cases whose
    ids, files or classes contain both words. `isa`: the instruction set without which nothing of
    this runs.
    """

    name: str
    old: str
    new: str
    tests: tuple[str, ...]
    isa: str = ""

    def place(self, texts: Mapping[str, str]) -> str:
        """The file of these sources that holds `old`; ValueError unless it occurs once."""
        found = {name: n for name, text in texts.items() if (n := text.count(self.old))}
        if sum(found.values()) != 1:
            where = ", ".join(f"{name} {n}x" for name, n in found.items()) or "nowhere"
            raise ValueError(f"{self.name}: its text is to be found once, and is in: {where}")
        return next(iter(found))


def sources(root: Path) -> dict[str, str]:
    """File name -> text, of all that a defect may be planted in."""
    paths = sorted((root / "csrc").rglob("*"))
    return {str(p.relative_to(root)): p.read_text() for p in paths if p.suffix in SUFFIXES}


def parts_of(test: str) -> tuple[str, list[str]]:
    """`name[a, b]` -> name, [a, b]"""
    name, _, words = test.removesuffix("]").partition("[")
    return name, [word.strip() for word in words.split(",") if word.strip()]


def expression(tests: Iterable[str]) -> str:
    """What pytest's -k takes to select them."""
    return " or ".join(f"({' and '.join([name, *words])})" for name, words in map(parts_of, tests))


class TestFiles:
    """The test files of a tree, read once."""

    __test__ = False  # to pytest

    def __init__(self, root: Path) -> None:
        paths = sorted((root / "tests").rglob("test_*.py"))
        self._defined = {p: set(re.findall(r"\bdef (test_\w+)\(", p.read_text())) for p in paths}

    def defining(self, test: str) -> list[Path]:
        """Those with the function; of several those that a word names, since importing others may
        take long. ValueError for none."""
        name, words = parts_of(test)
        found = [path for path, names in self._defined.items() if name in names]
        if not found:
            raise ValueError(f"no test is called {name}")
        return [path for path in found if any(word in path.name for word in words)] or found
