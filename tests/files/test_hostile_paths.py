"""Paths that are no regular files, or too large: nothing waits for them or reads them for ever."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qfx
from qfx.generate import load_programs
from qfx.values.config import parse_options
from tests.files.test_hostile_files import Small, data_of, made

SKELETON = Small()


def _pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def _socket(path: Path) -> Path:
    here = os.getcwd()
    os.chdir(path.parent)  # its address has at most some 100 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)
    return path


# What a path is: that it is no regular file.
KINDS: dict[str, Callable[[Path], Path]] = {
    "a pipe": _pipe,
    "a device": lambda path: Path("/dev/zero"),
    "a socket": _socket,
}
READERS: dict[str, Callable[[Path], Any]] = {
    "load": lambda path: qfx.load(path, SKELETON),
    "Recipe.load": qfx.Recipe.load,
    "options": lambda path: parse_options({"recipe": path}),
    "load_programs": load_programs,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_a_path_that_is_no_regular_file(reader: str, kind: str, tmp_path: Path) -> None:
    path = KINDS[kind](tmp_path / "path")
    with pytest.raises(ValueError, match=f"{path} is {kind}, expected a regular file"):
        READERS[reader](path)


def _index(folder: Path) -> Path:
    (folder / "config.json").write_text(
        '{"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"a": '
        '{"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}, '
        '"format": "int-quantized"}}}}'
    )
    return _pipe(folder / "model.safetensors.index.json")


def _data(folder: Path) -> Path:
    qfx.save(made(), folder)
    path = data_of(folder)
    path.unlink()
    return _pipe(path)


INSIDE: dict[str, Callable[[Path], Path]] = {
    "qfx.json": lambda folder: _pipe(folder / "qfx.json"),
    "config.json": lambda folder: _pipe(folder / "config.json"),
    "data": _data,
    "index": _index,
}


@pytest.mark.parametrize("name", INSIDE)
def test_a_folder_that_holds_a_pipe(name: str, tmp_path: Path) -> None:
    path = INSIDE[name](tmp_path)
    with pytest.raises(ValueError, match=f"{path.name} (is a pipe|has 0 bytes)"):
        qfx.load(tmp_path, SKELETON)


def test_a_file_of_the_system_that_says_it_is_empty_is_not_read(tmp_path: Path) -> None:
    """It might wait, as /proc/kmsg does."""
    (tmp_path / "recipe.json").symlink_to("/proc/self/mountinfo")
    (tmp_path / "a.safetensors").symlink_to("/proc/self/mountinfo")
    with pytest.raises(ValueError, match="it is not JSON"):
        qfx.Recipe.load(tmp_path / "recipe.json")
    with pytest.raises((ValueError, OSError)):
        qfx.load(tmp_path / "a.safetensors", SKELETON)


def test_a_large_description_is_not_read(tmp_path: Path) -> None:
    for name in ("qfx.json", "recipe.json"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(2**28 + 1)
    for read in (lambda: qfx.load(tmp_path, SKELETON), lambda: qfx.Recipe.load(tmp_path / name)):
        with pytest.raises(ValueError, match=r"json has 268435457 bytes, and at most 268435456"):
            read()
