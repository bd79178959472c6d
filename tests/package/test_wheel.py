"""The wheel: its content, the systems that it runs on, and that a new program runs with it."""

from __future__ import annotations

import io
import os
import platform
import shutil
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import torch
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

from tests.lib.pairs import LONG
from tests.package.wheel import built, built_for_aarch64, run, unpacked

MOST_BYTES = 4_000_000
# The newest of each that manylinux_2_28 allows.
OLDEST_SYSTEM = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (8, 0, 0)}
MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
LIBRARIES = ("qfx/_C.abi3.so", "qfx/lib/libqfx.so", "qfx/lib/libqfx_programs.so")
FIRST_RESULT = """
import sys
sys.path[:0] = sys.argv[1:]
import torch
import qfx
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))
x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
y = model(x)
qfx.quantize_(model)
print(qfx.__file__, float((model(x) - y).norm() / y.norm()) < 0.05)
"""
COMPILED = """
import torch
import qfx
model = torch.nn.Sequential(torch.nn.Linear(64, 128)).eval()
with torch.no_grad():
    y = torch.compile(model, backend="qfx")(torch.ones(5, 64))
print(y.shape == (5, 128), qfx.__file__)
"""
STRICT = """
import torch
from torch import nn

import qfx

model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).eval()
x = torch.randn(64, 512)
config = qfx.Config(scheme=qfx.Scheme(w=qfx.QSpec(4)), skip=("2",))
served: nn.Module = qfx.quantize_(model, config)
codes: torch.Tensor = qfx.quantize(x, qfx.QSpec(8)).codes
gm, plan = qfx.rewrite(qfx.trace(model, x), config)
text: str = str(plan)
print(qfx.explain(model, x))
"""


@pytest.fixture(scope="module")
def names() -> list[str]:
    with zipfile.ZipFile(built()) as wheel:
        return wheel.namelist()


def test_one_wheel_is_for_every_python_and_an_old_system() -> None:
    assert "-cp310-abi3-manylinux_2_2" in built().name
    assert built().stat().st_size < MOST_BYTES


@pytest.mark.parametrize(
    "name",
    [*LIBRARIES, "qfx/py.typed", "qfx/_C.pyi", "qfx/vllm/plugin.py", "qfx/command/app.py"],
)
def test_the_wheel_holds(names: list[str], name: str) -> None:
    assert name in names


def test_the_wheel_holds_nothing_else(names: list[str]) -> None:
    kinds = {Path(name).suffix for name in names if name.startswith("qfx/")} - {""}
    assert kinds <= {".py", ".pyi", ".json", ".html", ".so", ".typed", ".h", ".cmake"}
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"qfx"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_metadata_and_entry_points(names: list[str]) -> None:
    folder = next(n.partition("/")[0] for n in names if ".dist-info/" in n)
    metadata = Parser().parsestr((unpacked() / folder / "METADATA").read_text())
    required = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert sorted(r.split(">")[0] for r in required) == [
        "rich",
        "tabulate",
        "torch",
        "tqdm",
        "typer",
    ]
    points = (unpacked() / folder / "entry_points.txt").read_text()
    for line in ("qfx = qfx.command.app:app", "qfx = qfx.dynamo_backend:qfx"):
        assert line in points
    assert "[vllm.general_plugins]\nqfx = qfx.vllm.plugin:register" in points


@pytest.mark.parametrize("library", LIBRARIES)
def test_symbols_of_systems(library: str) -> None:
    """None is newer than a system with glibc 2.28 has."""
    _check_systems((unpacked() / library).read_bytes(), MACHINES[platform.machine()])


def _check_systems(library: bytes, processor: str) -> None:
    elf = ELFFile(io.BytesIO(library))
    assert elf["e_machine"] == processor
    sections = [s for s in elf.iter_sections() if isinstance(s, GNUVerNeedSection)]
    found = {aux.name for s in sections for _, each in s.iter_versions() for aux in each}
    assert found
    for name in found:
        kind, _, version = name.partition("_")
        assert tuple(map(int, version.split("."))) <= OLDEST_SYSTEM[kind], name


@pytest.mark.skipif(not LONG, reason="compiles for minutes: QFX_TEST_PROFILE=long")
def test_a_wheel_for_another_processor(tmp_path: Path) -> None:
    if shutil.which("aarch64-linux-gnu-g++") is None:
        pytest.skip("no cross compiler: Debian's package is g++-aarch64-linux-gnu")
    wheel = built_for_aarch64(tmp_path)
    assert "-cp310-abi3-manylinux_2_" in wheel.name and wheel.name.endswith("_aarch64.whl")
    with zipfile.ZipFile(wheel) as file:
        for library in LIBRARIES:
            _check_systems(file.read(library), "EM_AARCH64")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="torch-abi-audit needs Python 3.11")
def test_symbols_of_python_and_torch() -> None:
    """libqfx knows no symbol of Python and only PyTorch's C shims; the face knows nothing of
    PyTorch and only Python's limited API."""
    from torch_abi_audit import inspect_extension
    from torch_abi_audit.symbols import extract_undefined_symbols

    face, library, programs = (inspect_extension(unpacked() / name) for name in LIBRARIES)
    assert not face.torch.uses_torch and face.cpython.compliant
    assert not programs.torch.uses_torch
    assert library.torch.stable and not library.torch.unstable_symbols
    assert library.torch.min_torch_version == "2.11.0"
    for name in LIBRARIES[1:]:
        assert not [s for s in extract_undefined_symbols(unpacked() / name) if "Py" in s]


def test_a_new_program_runs() -> None:
    """In a Python without this tree's own installation."""
    packages = [p for p in sys.path if p.endswith("site-packages")]
    command = [sys.executable, "-I", "-S", "-c", FIRST_RESULT, str(unpacked()), *packages]
    found = run(*command, cwd=unpacked()).split()
    assert found == [str(unpacked() / "qfx" / "__init__.py"), "True"]


def test_removing_leaves_nothing(tmp_path: Path) -> None:
    """Neither in the environment nor in the user's cache, after a model was compiled."""
    environment, cache = tmp_path / "venv", tmp_path / "cache"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    before = sorted(environment.rglob("*"))
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "-q", "--no-deps", "--no-index", built())
    packages = os.pathsep.join(p for p in sys.path if p.endswith("site-packages"))
    variables = f"PYTHONPATH={packages}", f"XDG_CACHE_HOME={cache}"
    assert "True" in run("env", *variables, python, "-c", COMPILED, cwd=tmp_path)
    assert list(cache.glob("qfx/*"))
    run("env", *variables, environment / "bin" / "qfx", "cache", "--clear", cwd=tmp_path)
    run(*pip, "uninstall", "-q", "-y", "qfx")
    assert (list(cache.iterdir()), sorted(environment.rglob("*"))) == ([], before)


def test_a_strict_program_is_checked(tmp_path: Path) -> None:
    """mypy --strict of a user's program, for whom qfx is an installed package with types."""
    program = tmp_path / "program.py"
    program.write_text(STRICT)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache"]
    run(*command, "--python-executable", _python_with(tmp_path), program, cwd=tmp_path)


def _python_with(folder: Path) -> Path:
    """An environment in which mypy finds the wheel and PyTorch as installed packages."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "qfx").symlink_to(unpacked() / "qfx")
    (site / "torch").symlink_to(Path(torch.__file__).parent)
    return folder / "venv" / "bin" / "python"


def test_the_sdist_holds_what_builds_and_no_tests(tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path)
    (sdist,) = tmp_path.glob("*.tar.gz")
    listed = run("tar", "tzf", sdist).split()
    top = {name.split("/")[1] for name in listed}
    assert {"CMakeLists.txt", "csrc", "qfx", "pyproject.toml", "LICENSE"} <= top
    assert top.isdisjoint({"tests", "benchmarks", ".ci", "build"})
    assert sdist.stat().st_size < MOST_BYTES
