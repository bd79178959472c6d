"""The documents tell the truth: their code runs, their tour is current, their names exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import qfx

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
SOURCES = [
    path
    for folder in ("qfx", "csrc", "tests")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".py", ".cpp", ".h", ".inc"}
]


def _python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if _python_blocks(p)], ids=lambda p: p.name)
def test_python_blocks_run(path: Path, tmp_path: Path) -> None:
    """In order, in one process, as a reader would paste them."""
    script = "import torch; torch.set_num_threads(2)\n" + "\n".join(_python_blocks(path))
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "matmuls in int8" in result.stdout


def test_tour_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "docs" / "make_tour.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def test_cited_equations_exist() -> None:
    defined = set(re.findall(r"\*\*\(([A-Z]\d)\)\*\*", (ROOT / "docs/numerics.md").read_text()))
    assert len(defined) > 8
    cited = {
        (path.name, equation)
        for path in [*SOURCES, *DOCUMENTS]
        for equation in re.findall(r"\(([QGEB]\d)\)", path.read_text())
    }
    assert {c for c in cited if c[1] not in defined} == set()


def test_every_equation_is_cited_by_code_or_tests() -> None:
    defined = set(re.findall(r"\*\*\(([A-Z]\d)\)\*\*", (ROOT / "docs/numerics.md").read_text()))
    text = "".join(path.read_text() for path in SOURCES)
    assert {e for e in defined if f"({e})" not in text} == set()


def test_every_option_is_in_the_readme() -> None:
    rows = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert {f.name for f in fields(qfx.Config)} <= rows


def test_first_commands_of_the_readme_are_make_targets() -> None:
    block = re.search(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    targets = re.findall(r"^make (\w+)", block.group(1), re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert targets == ["demo", "test"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_links_lead_somewhere() -> None:
    for path in DOCUMENTS:
        for link in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / link).exists(), f"{path.name}: {link}"


def test_files_named_in_the_architecture_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    for name in re.findall(r"`((?:qfx|csrc|tests)/[\w/.]+\.(?:py|cpp|h|inc))`", text):
        assert (ROOT / name).exists(), name
