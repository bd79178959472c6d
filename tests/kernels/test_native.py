"""What computes on the CPU by itself: tests/native is built without torch and run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import qfx._C as _C
from tests.kernels import emulation
from tests.lib.builds import one_process, with_cpu_objects


@pytest.fixture(scope="module")
def program() -> Path:
    if missing := emulation.missing_to_build():
        pytest.skip(missing)
    with one_process(emulation.NATIVE):
        return emulation.build_native(*with_cpu_objects())


def test_kernels_agree_with_their_definition_between_pages_that_fault(program: Path) -> None:
    output = emulation.run(program)
    assert emulation.tested_in(output) == set(_C.isas())
    assert [isa for isa in _C.isas() if emulation.unchecked_in(output, isa)] == []
    assert [k for k in _C.kernels() if k["supported"] and f"{k['name']} ok, " not in output] == []


def test_a_part_that_does_not_exist_is_an_error(program: Path) -> None:
    result = subprocess.run([program, "tile"], capture_output=True, text=True)
    assert result.returncode == 1
    assert "there is no part 'tile'" in result.stdout
