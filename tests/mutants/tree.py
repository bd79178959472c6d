"""Tree: a copy of the sources in which defects are planted, built and tested.

It is kept, so that the next run compiles only what has changed since. The checkout, its
installation and its own build are not touched.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

COMPILED = ("_C.abi3.so", "lib/libqfx.so")
_KEPT = {".so", ".pyc"}  # in a copy, beside the files of the sources
_CHECK = """
import qfx, qfx._C as C, tests, sys
for module in (qfx, C, tests):
    if not module.__file__.startswith(sys.argv[1]):
        sys.exit(f"the copy in {sys.argv[1]} would be tested with {module.__file__}")
print(*C.isas())
"""


class Failed(Exception):
    """What a command that must succeed has printed."""


def command(*words: object, cwd: Path | None = None, **environment: str) -> str:
    result = subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if result.returncode:
        raise Failed(f"{' '.join(map(str, words))}\n{result.stdout}")
    return result.stdout


class Tree:
    """The sources of `root` in `folder`, equal to them but for one defect at a time."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.path = root, folder / "tree"
        hook = str(self.path / "tests" / "mutants" / "hook")
        self._clean, self._mutated = folder / "clean", folder / "mutated"
        self.environment = {
            "PYTHONPATH": os.pathsep.join([hook, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        }

    def copy(self) -> None:
        """Makes the copy equal to the sources; files that are equal keep their times."""
        listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        names = {name for name in command(*listed, cwd=self.root).split("\0") if name}
        for name in names:
            source, to = self.root / name, self.path / name
            if source.is_file() and not (to.exists() and to.read_bytes() == source.read_bytes()):
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, to)
        for path in [p for p in self.path.rglob("*") if p.is_file()]:
            name = str(path.relative_to(self.path))
            if path.suffix not in _KEPT and not (name in names and (self.root / name).is_file()):
                path.unlink()

    def build(self) -> None:
        """Compiles the copy without a defect. Raises Failed."""
        options = {
            "CMAKE_BUILD_TYPE": "Release",
            "Python_EXECUTABLE": sys.executable,
            "QFX_CUDA": "OFF",
        }
        defined = [f"-D{name}={value}" for name, value in options.items()]
        command("cmake", "-S", self.path, "-B", self._clean, "-G", "Ninja", *defined)
        command("ninja", "-C", self._clean)  # as below: another one compiles everything anew

    def install(self, build: Path | None = None) -> None:
        """Puts the libraries of the clean build into the copy, or those of another build."""
        for name in COMPILED:
            to = self.path / "qfx" / name
            to.parent.mkdir(exist_ok=True)
            to.unlink(missing_ok=True)  # not into the file that a process may have mapped
            shutil.copy((build or self._clean) / name, to)

    def check(self) -> set[str]:
        """The instruction sets that the copy runs on here. Raises Failed unless Python, started in
        it, imports the copy."""
        here = f"{self.path}{os.sep}"
        words = (sys.executable, "-c", _CHECK, here)
        return set(command(*words, cwd=self.path, **self.environment).split())

    @contextmanager
    def planted(self, where: str, defect: str) -> Iterator[None]:
        """The file `where` of the copy has the text `defect` inside. Raises Failed if it does not
        compile."""
        place = self.path / where
        text, times = place.read_text(), place.stat()
        native = place.suffix != ".py"
        try:
            _write(place, defect)
            if native:
                self._rebuild()
            yield
        finally:
            _write(place, text)
            os.utime(place, ns=(times.st_atime_ns, times.st_mtime_ns))  # the clean build is of it
            shutil.rmtree(self.path / "build", ignore_errors=True)  # what tests have built of it
            if native:
                self.install()

    def _rebuild(self) -> None:
        """In a copy of the clean build, where only what depends on the defect is compiled."""
        shutil.rmtree(self._mutated, ignore_errors=True)
        shutil.copytree(self._clean, self._mutated, symlinks=True)
        command("ninja", "-C", self._mutated)
        self.install(self._mutated)


def _write(path: Path, text: str) -> None:
    """Without the bytecode, which is recognised by length and second alone."""
    path.write_text(text)
    if path.suffix == ".py":
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
