"""What computes on the CPU by itself: tests/native is built without torch and run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import qfx._C as _C

from tests.kernels import emulation

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "native"  # kept, so that only what changed is compiled again


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def program() -> str:
    if shutil.which("cmake") is None or shutil.which("ninja") is None:
        pytest.skip("cmake and ninja build the native tests, and one of them is not on the PATH")
    _run("cmake", "-S", str(ROOT / "tests" / "native"), "-B", str(BUILD), "-G", "Ninja")
    _run("cmake", "--build", str(BUILD))
    return str(BUILD / "native_tests")


def test_kernels_agree_with_their_definition_between_pages_that_fault(program: str) -> None:
    output = _run(program)
    assert emulation.tested_in(output) == set(_C.isas())
    assert [isa for isa in _C.isas() if emulation.unchecked_in(output, isa)] == []
    assert [k for k in _C.kernels() if k["supported"] and f"{k['name']} ok, " not in output] == []


def test_a_part_that_does_not_exist_is_an_error(program: str) -> None:
    result = subprocess.run([program, "tile"], capture_output=True, text=True)
    assert result.returncode == 1
    assert "there is no part 'tile'" in result.stdout
