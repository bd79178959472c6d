"""Kernels for instruction sets that this machine lacks, emulated: tests/kernels/emulation.py."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import qfx._C as _C
from tests.kernels import emulation
from tests.lib.builds import one_process, with_cpu_objects


@pytest.fixture(scope="module")
def emulated() -> str:
    if missing := emulation.missing_on_x86_64():
        pytest.skip(missing)
    with one_process(emulation.NATIVE):
        program = emulation.build_emulated(*with_cpu_objects())
    return emulation.run(program)


@pytest.mark.parametrize("isa", ["amx", "avxvnniint8"])
def test_rare_instructions_of_x86_64(emulated: str, isa: str) -> None:
    below = {"amx": "avx512vnni", "avxvnniint8": "avx2"}[isa]  # what its other kernels need
    if below not in _C.isas():
        pytest.skip(f"{isa} stands on {below}, which this processor lacks")
    assert isa in emulation.tested_in(emulated)
    assert emulation.unchecked_in(emulated, isa) == set()


@pytest.fixture(scope="module")
def aarch64() -> Path:
    if missing := emulation.missing_on_aarch64():
        pytest.skip(missing)
    return emulation.build_aarch64()


@pytest.mark.parametrize("cpu", list(emulation.LEVELS))
def test_arm_finds_and_runs_its_kernels(aarch64: Path, cpu: str) -> None:
    isas, parts = emulation.LEVELS[cpu]
    output = emulation.run_aarch64(aarch64, cpu)
    assert emulation.tested_in(output) == isas
    if not parts:
        assert {i: emulation.unchecked_in(output, i) for i in isas} == {i: set() for i in isas}


@pytest.mark.parametrize("name", ["neon", "neondot", "neoni8mm"])
def test_tiles_of_arm_keep_their_sums_in_registers(aarch64: Path, name: str) -> None:
    objdump = shutil.which("aarch64-linux-gnu-objdump")
    if objdump is None:
        pytest.skip("no aarch64-linux-gnu-objdump on the PATH")
    (path,) = aarch64.parent.glob(f"**/arm/{name}.cpp.o")
    listing = subprocess.run([objdump, "-dC", path], check=True, capture_output=True, text=True)
    functions = [f for f in listing.stdout.split("\n\n") if "::tile<" in f or "::strip<" in f]
    spilling = [f.strip().split("\n")[0] for f in functions if _moves_vectors_to_the_stack(f)]
    assert len(functions) >= 6
    assert spilling == []


def _moves_vectors_to_the_stack(function: str) -> bool:
    lines = [line.split("\t") for line in function.split("\n")]
    return any(
        parts[2][:2] in ("st", "ld") and parts[3].startswith("q") and "[sp" in parts[3]
        for parts in lines
        if len(parts) > 3
    )


def test_a_kernel_that_was_not_checked_is_missed() -> None:
    lines = [f"{name}__neon ok, 3 cases" for name in ("s8s8_gemm_1x32", *emulation.CHECKED)]
    assert emulation.unchecked_in("\n".join(lines), "neon") == set()
    for name, line in zip(("tiles", *emulation.CHECKED), lines, strict=True):
        rest = "\n".join(other for other in lines if other != line)
        assert emulation.unchecked_in(rest, "neon") == {name}


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert emulation.missing_to_build() == "not on the PATH: cmake and ninja"
    assert "qemu-user-static" in emulation.missing_on_aarch64()
    monkeypatch.setattr(emulation, "qemu", lambda: "qemu-aarch64")
    monkeypatch.setattr(emulation, "find_spec", lambda name: None)
    assert "g++-aarch64-linux-gnu" in emulation.missing_on_aarch64()


def test_kernels_that_this_processor_lacks_are_never_chosen() -> None:
    chosen = {k["isa"] for k in _C.kernels() if k["supported"]}
    assert set(_C.isas()) == chosen
    assert _C.isa() in chosen
