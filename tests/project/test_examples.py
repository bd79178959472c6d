"""The examples run from a shell, and the last number each prints is what it promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lib.fresh_process import run_python

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# name -> the least and the greatest of the number
PROMISES = {
    "compile_model": (30, 60),  # dB
    "rewrite_graph": (66, 67),  # percent: two linears of three
    "calibrate": (6, 40),  # dB of noise less than without a recipe
    "own_pattern": (30, 60),  # dB
    "replace_linears": (0, 35),  # percent of the memory: a byte of four, and the embedding
    "learned_scales": (85, 100),  # percent right; 75 before the scales are trained
    "binary_finetune": (93, 100),  # 81 before
}


@pytest.mark.parametrize("name", PROMISES)
def test_example(name: str, tmp_path: Path) -> None:
    if name == "replace_linears":
        pytest.importorskip("transformers", reason="the example replaces a model of transformers")
    script, offline = EXAMPLES / f"{name}.py", {"HF_HUB_OFFLINE": "1"}
    result = run_python(
        script, environment=offline, folder=tmp_path, seconds=600, warnings_of="qfx"
    )
    assert result.returncode == 0, result.stderr
    least, greatest = PROMISES[name]
    assert least <= float(result.stdout.splitlines()[-1]) <= greatest, result.stdout


@pytest.mark.parametrize("name", PROMISES)
def test_it_fits_a_screen(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 60
