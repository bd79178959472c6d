"""Words: docstrings have a subject and a verb, and a class name means one class."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    p for room in ("qfx", "benchmarks", "tests/lib") for p in (ROOT / room).rglob("*.py")
)
# Openers of fragments that hang on something outside of the docstring.
OPENERS = {
    "Of", "What", "That", "Those", "Whoever", "Who", "Whose", "Where", "Which", "How", "As", "For",
    "From", "By", "In", "With", "Without", "Under", "It", "They", "And", "Also", "So",
}  # fmt: skip


def _docstrings(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def _fragments(path: Path) -> list[str]:
    found = _docstrings(path)
    return [f"{path.name}:{line}: {t[:60]!r}" for line, t in found if t.split()[0] in OPENERS]


@pytest.mark.parametrize("room", sorted({p.relative_to(ROOT).parts[0] for p in FILES}))
def test_docstrings_have_a_subject(room: str) -> None:
    found = [f for p in FILES if p.relative_to(ROOT).parts[0] == room for f in _fragments(p)]
    assert not found, "\n".join(found)


def test_a_fragment_is_found(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text('"""Sizes of tiles."""\ndef f():\n    """Of a tile."""\n')
    assert _fragments(path) == ["some.py:2: 'Of a tile.'"]


def test_a_class_name_means_one_class() -> None:
    names = Counter(
        node.name
        for path in FILES
        if path.is_relative_to(ROOT / "qfx")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, count in names.items() if count > 1]
