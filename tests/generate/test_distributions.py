"""Installed packages are identified by distributions, wherever they lie; other code is not."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import tokenizers
import torch

from qfx.generate import distributions as installed
from qfx.generate.code_fingerprint import code_fingerprints
from qfx.generate.fingerprint import Fingerprinter

RECORD = "own_pkg/__init__.py,sha256=abc,9\nown_pkg-1.0.dist-info/METADATA,sha256=def,9\n"
EDITABLE = "__editable__.own_pkg-1.0.pth,sha256=abc,9\nown_pkg-1.0.dist-info/METADATA,sha256=d,9\n"


def distribution(info: Path, record: str | None = RECORD, version: str = "1.0") -> None:
    info.mkdir(parents=True)
    name = "PKG-INFO" if info.suffix == ".egg-info" else "METADATA"
    (info / name).write_text(f"Metadata-Version: 2.1\nName: own-pkg\nVersion: {version}\n")
    if record is not None:
        (info / "RECORD").write_text(record)


# Where the package lies -> its distribution beside it, or elsewhere, and whether it is installed.
PLACES: dict[str, tuple[str, Callable[[Path], object], bool]] = {
    "a virtual environment": (
        "venv/lib/python3/site-packages",
        lambda root: distribution(root / "venv/lib/python3/site-packages/own_pkg-1.0.dist-info"),
        True,
    ),
    "pip install --target": (
        "libraries",
        lambda root: distribution(root / "libraries/own_pkg-1.0.dist-info"),
        True,
    ),
    "a Linux distribution": (
        "python3/dist-packages",
        lambda root: distribution(root / "python3/dist-packages/own_pkg-1.0.egg-info", None),
        True,
    ),
    "a project": ("project", lambda root: None, False),
    "an editable install": (
        "project/src",
        lambda root: distribution(root / "site-packages/own_pkg-1.0.dist-info", EDITABLE),
        False,
    ),
    "python setup.py develop": (
        "project",
        lambda root: distribution(root / "project/own_pkg.egg-info", None),
        False,
    ),
    "a file put there by hand": ("site-packages", lambda root: None, False),
}


def loaded(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str = "x = 1\n") -> ModuleType:
    """The package own_pkg of this folder, imported anew."""
    (folder / "own_pkg").mkdir(parents=True, exist_ok=True)
    (folder / "own_pkg/__init__.py").write_text(text)
    shutil.rmtree(folder / "own_pkg/__pycache__", ignore_errors=True)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "own_pkg", raising=False)
    for cached in (installed._of_file, installed._installed):
        cached.cache_clear()
    module = importlib.import_module("own_pkg")
    monkeypatch.setitem(sys.modules, "own_pkg", module)
    return module


@pytest.mark.parametrize("name", PLACES)
def test_a_package_is_installed_where_a_distribution_lists_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, distributed, is_installed = PLACES[name]
    distributed(tmp_path)
    found = installed.identity(loaded(tmp_path / folder, monkeypatch))
    assert found.startswith("own-pkg 1.0 ") is is_installed and bool(found) is is_installed


def test_modules_of_the_interpreter_and_of_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (json, sys, importlib.import_module("_json")):
        assert installed.identity(module) == f"Python {sys.version}"
    for module in (torch, numpy, numpy.linalg, tokenizers.models):
        package = module.__name__.partition(".")[0]
        assert installed.identity(module).startswith(
            f"{package} {sys.modules[package].__version__}"
        )
    assert installed.identity(types.ModuleType("made_by_a_program")) == ""


def test_the_code_that_calls_a_package_is_told_with_its_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same in another folder; other for another version, other files, or another caller."""

    def told(folder: str, version: str = "1.0", record: str = RECORD, calls: str = "x") -> Any:
        distribution(tmp_path / folder / f"own_pkg-{version}.dist-info", record, version)
        package = loaded(tmp_path / folder, monkeypatch)
        caller = types.ModuleType("a_model")  # of a project
        vars(caller).update(own_pkg=package)
        exec(f"def forward(x): return own_pkg.{calls}", vars(caller))
        monkeypatch.setitem(sys.modules, "a_model", caller)
        return [*code_fingerprints(Fingerprinter({}), ["a_model"], [])]

    first = told("first")
    assert told("second") == first
    assert told("newer", version="1.1") != first
    assert told("rebuilt", record=RECORD.replace("abc", "xyz")) != first
    assert told("edited", calls="y") != first
