"""Files: there is always a whole one, and what is read is checked before it is used."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import qfx
from qfx import QSpec, Recipe, Scheme, SiteRecipe
from qfx.io.atomic_write import write_text
from qfx.report.report_row import Row
from tests.lib.mutations import mutated
from tests.rewriting.test_schemes import STATIC_ASYMMETRIC

LONG = 1 << 20
FULL = """
import resource, sys
from tests.io.test_files import WRITERS
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
for name, write in WRITERS.items():
    try:
        write(f"{sys.argv[1]}/{name}")
    except OSError as why:
        print(why.filename, why.strerror)
"""


def _recipe() -> Recipe:
    spec = Scheme(x=STATIC_ASYMMETRIC, w=QSpec(bits=4), rotation=16)
    sites = (
        SiteRecipe("a.b", 1, 2, 8, spec, (0.5,) * 8, 0.125, 3, 31.4, "measured", (2, 5)),
        SiteRecipe("c", 0, 4, 2, None, reason="loses too much"),
    )
    return Recipe(sites)


def _long_recipe(path: str) -> None:
    Recipe((SiteRecipe("a", 0, 4, 2, None, reason="x" * LONG),)).save(path)


def _long_page(path: str) -> None:
    qfx.Report((Row("a", "n", "1x2x3", "float", "", "x" * LONG),), 1).save_html(path)


WRITERS = {
    "recipe": _long_recipe,
    "page": _long_page,
    "text": lambda path: write_text(path, "x" * LONG),
}


def test_a_full_disk_leaves_the_earlier_file(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: some of the new one is written."""
    paths = [tmp_path / name for name in WRITERS]
    for path in paths:
        path.write_text("earlier")
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = "".join(f"{path} File too large\n" for path in paths)
    assert done.stdout == said, done.stdout + done.stderr
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    assert {path.read_text() for path in paths} == {"earlier"}


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_failure_at_the_end_leaves_the_earlier_file(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(5, "Input/output error", "somewhere")

    path = tmp_path / "file"
    path.write_text("earlier")
    monkeypatch.setattr(os, "fsync" if fails == "fsync" else "replace", fail)
    monkeypatch.setattr(Path, "replace", Path.replace if fails == "fsync" else fail)
    with pytest.raises(OSError, match=f"Input/output error: '{path}'"):
        write_text(path, "new")
    assert path.read_text() == "earlier" and list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_encoded_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("earlier")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert path.read_text() == "earlier" and list(tmp_path.iterdir()) == [path]


def test_permissions_stay_and_links_are_followed(tmp_path: Path) -> None:
    path, link, other = tmp_path / "file", tmp_path / "link", tmp_path / "other"
    path.write_text("earlier")
    path.chmod(0o640)
    link.symlink_to(path)
    write_text(link, "new")
    assert link.is_symlink() and path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    before = os.umask(0o027)
    try:
        write_text(other, "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE(other.stat().st_mode) == 0o640


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "new")
    assert os.read(reader, 9) == b"new" and stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)
    with pytest.raises(OSError, match="No space left"):
        write_text("/dev/full", "new")
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path, "new")
    with pytest.raises(FileNotFoundError, match="none/file"):
        write_text(tmp_path / "none" / "file", "new")


def test_any_change_of_a_recipe_gives_a_usable_one_or_a_value_error(tmp_path: Path) -> None:
    count = accepted = 0
    for text in mutated(_recipe().to_json()):
        count += 1
        try:
            recipe = Recipe.from_json(text)
        except ValueError:
            continue
        accepted += 1
        assert all(c.isprintable() or c == "\n" for c in str(recipe))
        recipe.save(tmp_path / "recipe.json")
        assert Recipe.load(tmp_path / "recipe.json") == recipe
    assert count > 2500 and 50 < accepted < count / 2, (count, accepted)
