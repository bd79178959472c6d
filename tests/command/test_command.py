"""The command `qfx`: what it prints and what it removes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import qfx
import qfx._C as _C
from qfx.command.app import app
from qfx.io.disk_cache import user_folder


def run(*words: str) -> str:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return result.output


def test_info_says_what_a_report_needs() -> None:
    found = json.loads(run("info", "--json"))
    assert (found["qfx"], found["PyTorch"]) == (qfx.__version__, torch.__version__)
    assert found["instruction set"].startswith(f"{_C.isa()} (of ")
    assert found["CUDA kernels"] == "none"
    table = run("info")
    assert all(name in table for name in found)


def test_info_says_where_pytorch_has_cuda_and_qfx_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "was built without CUDA kernels" in json.loads(run("info", "--json"))["CUDA kernels"]


def test_the_cache_is_cleared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (user_folder() / "programs").mkdir()
    (user_folder() / "programs" / "a").write_bytes(b"1234")
    assert run("cache") == f"{tmp_path}/qfx: 1 files, 4 bytes\n"
    assert run("cache", "--clear") == f"removed {tmp_path}/qfx: 1 files, 4 bytes\n"
    assert list(tmp_path.iterdir()) == []
    assert run("cache", "--clear") == f"removed {tmp_path}/qfx: 0 files, 0 bytes\n"


def test_of_a_link_the_link_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a").write_bytes(b"1234")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "qfx").symlink_to(tmp_path / "elsewhere")
    run("cache", "--clear")
    assert list((tmp_path / "cache").iterdir()) == []
    assert (tmp_path / "elsewhere" / "a").read_bytes() == b"1234"


@pytest.mark.parametrize("words", [("unknown",), ("info", "--unknown"), ("cache", "a")])
def test_wrong_words_are_an_exit_code(words: tuple[str, ...]) -> None:
    assert CliRunner().invoke(app, words).exit_code == 2
