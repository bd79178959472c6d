"""Laws of the machine code: nothing wide runs before the dispatch, and hot loops do not spill."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lib.disassembly import (
    exports_of,
    functions_of,
    has_static_initializer,
    shared_functions_of,
)

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("objdump", "nm", "as")
pytestmark = [
    pytest.mark.skipif(
        platform.machine() not in ("x86_64", "AMD64"), reason="these laws are of x86-64 code"
    ),
    pytest.mark.skipif(
        any(shutil.which(tool) is None for tool in TOOLS), reason="needs objdump, nm and as"
    ),
]


@dataclass(frozen=True)
class Objects:
    """What the extension that is installed was linked from."""

    for_isa: list[Path]  # compiled with flags of an instruction set
    for_all: list[Path]


@pytest.fixture(scope="module")
def objects() -> Objects:
    trees = sorted(
        ROOT.glob("build/cp*/CMakeFiles/qfx_cpu.dir"), key=lambda path: path.stat().st_mtime
    )
    if not trees:
        pytest.skip("qfx was not built in this folder, so its object files are not here")
    commands = json.loads((trees[-1].parent.parent / "compile_commands.json").read_text())
    parts: dict[bool, list[Path]] = {True: [], False: []}
    for command in commands:
        for_isa = re.search(r" -m(?!prefer)", command["command"]) is not None
        parts[for_isa].append(Path(command["directory"], command["output"]))
    return Objects(parts[True], parts[False])


def test_inner_loops_keep_their_accumulators_in_registers(objects: Objects) -> None:
    tested = 0
    for path in objects.for_isa:
        kernels = [
            f
            for f in functions_of(path)
            if re.search(r"::(?:tile|strip|strip_of_pair|pair|weight_only\w*)<", f.name)
        ]
        hot = [f for f in kernels if f.hot_loops()]
        assert [f.name for f in kernels if f not in hot and not f.calls("strip")] == []
        assert [f"{path.name} {f.name} {i}" for f in hot for i in f.spills()] == []
        tested += len(hot)
    assert tested >= 60


def _wide(path: Path) -> list[str]:
    return [f"{f.name} {i}" for f in functions_of(path) for i in f.body if i.is_wide]


def test_only_the_files_of_instruction_sets_hold_wide_instructions(objects: Objects) -> None:
    assert {p.name: _wide(p)[:3] for p in objects.for_all if _wide(p)} == {}
    assert [p.name for p in objects.for_isa if not _wide(p)] == []


def test_files_of_instruction_sets_share_no_function_with_others(objects: Objects) -> None:
    for path in objects.for_isa:
        assert shared_functions_of(path) == [], path.name
        assert not has_static_initializer(path), path.name
        foreign = [n for n in exports_of(path) if not re.match(r"qfx::cpu::\w*kernels_\w+\(\)", n)]
        assert foreign == [], path.name


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
        ("nop", "vmovq rcx, xmm16", 1),
        ("nop", "vmovq xmm16, rcx", 1),
        ("nop", "vmovq xmm1, qword ptr [rcx]", 0),
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
