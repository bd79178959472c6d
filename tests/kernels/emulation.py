"""The native tests (tests/native) on processors that this machine is not: `make emulate`.

Kernels of x86-64 whose instructions are rare run with those written in C++, which is
tests/native/emulated; kernels of 64-bit ARM run under qemu, on processors of three levels.
Needs nothing but Python's library, so that make can run it by itself."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "build" / "native"
X86_64 = ("x86_64", "AMD64")
# A processor as qemu names it -> what must be found and used there, and the parts to run, all if
# empty. The last has all kernels; on the others the least that shows that they lack no instruction.
LEVELS: dict[str, tuple[set[str], tuple[str, ...]]] = {
    "cortex-a53": ({"neon", "ref"}, ("tiles", "gemm")),
    "neoverse-n1": ({"neondot", "neon", "ref"}, ("tiles", "gemm")),
    "max": ({"neoni8mm", "neondot", "neon", "ref"}, ()),
}
# What a whole run reports as right of each instruction set, beside its tiles.
CHECKED = (
    "widen", "range", "quantize", "quantize_clamped", "random", "quantize_stochastic",
    "range_of_columns", "quantize_columns", "epilogue", "weight_only", "finish_floats", "attention",
    "cache", "add_groups", "linear_groups", "rotate", "rotate_back",
    "binary_signs", "binary_gemm", "gemm", "linear", "pack_floats", "doctored kernels are refused",
    "unpack_lowbit", "doctored kernels of few bits are refused",
)  # fmt: skip
NO_FEW_ROWS = ("ref", "neon", "neondot", "neoni8mm")  # of codes of 4 and 5 bits: these unpack them


class Failed(Exception):
    """A command's output, which ends with what went wrong."""


def missing_to_build() -> str:
    """What is missing to build the native tests, as a sentence; empty if nothing is."""
    missing = [tool for tool in ("cmake", "ninja") if shutil.which(tool) is None]
    return f"not on the PATH: {' and '.join(missing)}" if missing else ""


def missing_on_x86_64() -> str:
    if platform.machine() not in X86_64:
        return f"these kernels are of x86-64, and this is {platform.machine()}"
    return missing_to_build()


def qemu() -> str | None:
    return shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")


def cross_compiler() -> str | None:
    """A C++ compiler for 64-bit ARM, perhaps with arguments, between spaces."""
    if shutil.which("aarch64-linux-gnu-g++"):
        return "aarch64-linux-gnu-g++"
    target = "c++ -target aarch64-linux-musl"
    if shutil.which("zig"):
        return f"zig {target}"
    return f"{sys.executable} -m ziglang {target}" if find_spec("ziglang") else None


def missing_on_aarch64() -> str:
    if qemu() is None:
        return "no qemu-aarch64 on the PATH (Debian's package is qemu-user-static)"
    if cross_compiler() is None:
        return "no compiler for aarch64: g++-aarch64-linux-gnu of Debian, or pip's ziglang"
    return missing_to_build()


def _run(*command: str) -> str:
    result = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
    )
    text = result.stdout.decode()
    if result.returncode != 0:
        raise Failed(f"{' '.join(command)}\n{text}")
    return text


def _build(folder: Path, target: str, *options: str) -> Path:
    """The program, in a folder that is kept, so that only what changed is compiled again."""
    source, own = str(ROOT / "tests" / "native"), "-DQFX_CPU_OBJECTS="  # unless options say others
    _run("cmake", "-S", source, "-B", str(folder), "-G", "Ninja", own, *options)
    _run("cmake", "--build", str(folder), "--target", target)
    return folder / target


def build_native(*options: str) -> Path:
    return _build(NATIVE, "native_tests", *options)


def build_emulated(*options: str) -> Path:
    """In the folder of the one above, with which it shares most object files."""
    return _build(NATIVE, "emulated_tests", *options)


def for_aarch64() -> tuple[str, ...]:
    """CMake's arguments that make static programs for 64-bit ARM."""
    compiler = cross_compiler()
    assert compiler is not None
    return (
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        "-DCMAKE_EXE_LINKER_FLAGS=-static",
        "-DCMAKE_CXX_COMPILER=" + compiler.replace(" ", ";"),
    )


def build_aarch64() -> Path:
    return _build(ROOT / "build" / "native-aarch64", "native_tests", *for_aarch64())


def run(program: Path) -> str:
    return _run(str(program))


def run_aarch64(program: Path, cpu: str) -> str:
    emulator = qemu()
    assert emulator is not None
    return _run(emulator, "-cpu", cpu, str(program), *LEVELS[cpu][1])


def tested_in(output: str) -> set[str]:
    """The instruction sets that a run of the native tests found and tested."""
    return {line.split(":")[0] for line in output.splitlines() if line.endswith(": tested")}


def unchecked_in(output: str, isa: str) -> set[str]:
    """What of this instruction set the run does not report as right."""
    checked = {line.split(" ok, ")[0] for line in output.splitlines() if " ok, " in line}
    tiles = any(name.endswith(f"_gemm_1x32__{isa}") for name in checked)
    wanted = CHECKED if isa in NO_FEW_ROWS else (*CHECKED, "lowbit")
    missing = {name for name in wanted if f"{name}__{isa}" not in checked}
    return missing if tiles else missing | {"tiles"}


def _report(where: str, output: str, expected: set[str]) -> bool:
    tested = tested_in(output)
    kernels = output.count(" ok, ")
    print(f"{where}: {', '.join(sorted(tested))} tested, {kernels} kernels ok", flush=True)
    if tested != expected:
        print(f"{where}: expected {', '.join(sorted(expected))}")
    return tested == expected


def main() -> int:
    good = True
    if missing := missing_on_x86_64():
        print(f"AMX and AVX-VNNI-INT8 are not emulated: {missing}")
        good = False
    else:
        output = run(build_emulated())
        good &= _report("x86-64", output, {"amx", "avxvnniint8", "ref"})
    if missing := missing_on_aarch64():
        print(f"64-bit ARM is not emulated: {missing}")
        return 1
    program = build_aarch64()
    for cpu, (isas, _) in LEVELS.items():
        good &= _report(f"aarch64 {cpu}", run_aarch64(program, cpu), isas)
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as failure:
        sys.exit(str(failure))
