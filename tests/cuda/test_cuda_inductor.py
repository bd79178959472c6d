"""What Inductor makes of rewritten graphs on a GPU: codes are made where activations are, once for
all readers, and their scales by divisions that round to nearest."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRITON = Path(sys.prefix) / "triton"  # apart, since PyTorch for CPUs comes without it
# What is launched, in order, and how many matrices of codes are written.
EXPECTED = {
    "w8a8-symmetric": ("triton linear linear triton linear triton", 2),
    "w8a8-asymmetric": ("triton linear linear triton linear triton", 2),
    "w8a8": ("triton quantize linear linear triton linear_dynamic triton", 0),
    "w8": ("triton linear_float linear_float triton linear_float triton", 0),
}


@pytest.fixture(scope="module")
def made_of() -> dict[str, Any]:
    """By scheme; one process for all, since what it imports takes longer than what it does."""
    paths = [str(TRITON), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "tests.cuda.inductor", *EXPECTED]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    if "No module named 'triton'" in done.stderr:
        pytest.skip(f"no Triton, neither in {TRITON}, where `make test` puts it, nor elsewhere")
    if missing := re.search(r"^Skipped: (.*)", done.stderr, re.MULTILINE):
        pytest.skip(missing[1])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("scheme", EXPECTED)
def test_a_norm_and_its_codes_are_one_kernel(scheme: str, made_of: dict[str, Any]) -> None:
    made = made_of[scheme]
    assert (" ".join(made["launches"]), made["codes"]) == EXPECTED[scheme]
    assert {kernel["stack"] for kernel in made["kernels"]} == {0}
    makes_codes = [k["divisions"] for k in made["kernels"]][: made["codes"]]
    assert all("div.rn.f32" in divisions for divisions in makes_codes)
    assert made["codes"] == 0 or makes_codes[1] == ["div.rn.f32"]  # without a norm's mean
