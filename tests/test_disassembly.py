"""Laws of the machine code: nothing wide runs before the dispatch, and hot loops do not spill."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.disassembly import (
    Function,
    exports_of,
    functions_of,
    has_static_initializer,
    shared_functions_of,
)

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("objdump", "nm", "as")
pytestmark = [
    pytest.mark.skipif(
        platform.machine() not in ("x86_64", "AMD64"), reason="these laws are of x86-64 code"
    ),
    pytest.mark.skipif(
        any(shutil.which(tool) is None for tool in TOOLS), reason="needs objdump, nm and as"
    ),
]


@pytest.fixture(scope="module")
def objects() -> list[Path]:
    """What the extension was linked from."""
    trees = sorted(ROOT.glob("build/*/CMakeFiles/_C.dir"), key=lambda path: path.stat().st_mtime)
    if not trees:
        pytest.skip("qfx was not built in this folder, so its object files are not here")
    return sorted(trees[-1].rglob("*.o"))


def _for_isa(path: Path) -> bool:
    return path.name.startswith("ukernel_") and path.name != "ukernel_ref.cpp.o"


# Moves to and from the stack that a loop may have: 12 accumulators, the ones, two codes of a row
# and two sums are 17 registers of 16. One of them waits in memory; measured, it costs nothing.
SPILLS = {"OffsetTwice, 3": 2}


def _too_many_spills(function: Function) -> list[str]:
    allowed = sum(count for name, count in SPILLS.items() if name in function.name)
    spills = [f"{function.name} {i}" for i in function.spills()]
    return spills if len(spills) > allowed else []


def test_inner_loops_keep_their_accumulators_in_registers(objects: list[Path]) -> None:
    tested = 0
    for path in filter(_for_isa, objects):
        tiles = [f for f in functions_of(path) if "::tile<" in f.name]
        assert [f.name for f in tiles if not f.hot_loops()] == []
        assert [spill for f in tiles for spill in _too_many_spills(f)] == [], path.name
        tested += len(tiles)
    assert tested >= 48  # three instruction sets: 18 + 6 + 24


def test_only_the_files_of_instruction_sets_hold_wide_instructions(objects: list[Path]) -> None:
    def wide(path: Path) -> list[str]:
        return [f"{f.name} {i}" for f in functions_of(path) for i in f.body if i.is_wide]

    assert {p.name: wide(p)[:3] for p in objects if not _for_isa(p) and wide(p)} == {}
    assert [p.name for p in objects if _for_isa(p) and not wide(p)] == []


def test_files_of_instruction_sets_share_no_function_with_others(objects: list[Path]) -> None:
    for path in filter(_for_isa, objects):
        assert shared_functions_of(path) == [], path.name
        assert not has_static_initializer(path), path.name
        names = [name.removeprefix("qfx::cpu::") for name in exports_of(path)]
        assert [n for n in names if not n.startswith(("kernels_", "row_kernels_"))] == []


def _assembled(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "planted.o"
    command = ["as", "--64", "-msyntax=intel", "-mnaked-reg", "-o", str(path)]
    subprocess.run(command, input=f".globl f\nf:\n{text}\n", text=True, check=True)
    return path


LOOP = """
    {before}
1:  {inside}
    vpmaddubsw ymm1, ymm2, ymm3
    sub rax, 1
    jne 1b
    ret
"""


@pytest.mark.parametrize(
    ("before", "inside", "spills"),
    [
        ("vmovdqu ymmword ptr [rsp+32], ymm1", "nop", 0),
        ("nop", "vmovdqu ymmword ptr [rsp+32], ymm1", 1),
        ("nop", "vpaddd zmm1, zmm2, zmmword ptr [rsp]", 1),
        ("nop", "vpbroadcastd ymm1, dword ptr [rbp+4]", 0),
        ("mov rbp, rsp", "vmovdqu ymm1, ymmword ptr [rbp-64]", 1),
        ("nop", "mov rcx, qword ptr [rsp]", 0),
    ],
)
def test_a_planted_spill_is_found(tmp_path: Path, before: str, inside: str, spills: int) -> None:
    (function,) = functions_of(_assembled(tmp_path, LOOP.format(before=before, inside=inside)))
    assert len(function.hot_loops()) == 1
    assert len(function.spills()) == spills


@pytest.mark.parametrize(
    ("text", "wide"),
    [
        ("vpxor ymm0, ymm0, ymm0", True),
        ("vpxord zmm0, zmm0, zmm31", True),
        ("kmovw k1, eax", True),
        ("shlx rax, rax, rcx", True),
        ("vmovups ymm0, ymmword ptr [eax]", True),
        ("paddd xmm0, xmm1", False),
        ("lock xadd qword ptr [rax], rcx", False),
    ],
)
def test_a_planted_wide_instruction_is_found(tmp_path: Path, text: str, wide: bool) -> None:
    (function,) = functions_of(_assembled(tmp_path, text))
    assert [i.is_wide for i in function.body] == [wide]


@pytest.mark.parametrize("kind", ["weak", "type f, @gnu_unique_object\n.globl", "globl"])
def test_a_planted_shared_function_is_found(tmp_path: Path, kind: str) -> None:
    path = _assembled(tmp_path, f".{kind} f\nret")
    assert shared_functions_of(path) == ([] if kind == "globl" else ["f"])
    assert exports_of(path) == (["f"] if kind == "globl" else [])


def test_a_planted_static_initializer_is_found(tmp_path: Path) -> None:
    assert not has_static_initializer(_assembled(tmp_path, "ret"))
    section = '.section .init_array, "aw"\n.quad f'
    assert has_static_initializer(_assembled(tmp_path, f"ret\n{section}"))
