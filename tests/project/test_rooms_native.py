"""The rooms of csrc, and which of them include which. Includes go down, so that a reader of a room
needs to know nothing of those above it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
SUFFIXES = {".cpp", ".cu", ".cuh", ".h", ".in", ".inc"}
# Each room and what it includes beside itself, the lowest first: no row names a later one, so there
# is no circle. `shared` are the files of csrc itself, `api` is what libqfx offers beside operators,
# and `python` makes qfx._C of that alone. `torch` are PyTorch's headers: what computes on the CPU
# knows nothing of it.
ROOMS = {
    "torch": "",
    "shared": "torch",
    "cpu/core": "shared",
    "cpu/kernels/tables": "shared cpu/core",
    "cpu/kernels/rows": "shared cpu/kernels/tables",
    "cpu/kernels/x86": "cpu/kernels/tables cpu/kernels/rows",
    "cpu/kernels/arm": "cpu/kernels/tables cpu/kernels/rows",
    "cpu/kernels": "cpu/core cpu/kernels/tables cpu/kernels/rows",
    "cpu/gemm": "shared cpu/core cpu/kernels/tables",
    "cpu/attention": "cpu/core cpu/kernels/tables cpu/gemm",
    "cpu/rnn": "cpu/core cpu/gemm",
    "cpu/conv": "shared cpu/core cpu/kernels/tables cpu/gemm",
    "cpu/binary": "cpu/core cpu/kernels/tables cpu/kernels cpu/gemm",
    "cpu/ops": (
        "shared cpu/core cpu/kernels/tables cpu/kernels cpu/gemm cpu/attention cpu/rnn cpu/conv "
        "cpu/binary"
    ),
    "cpu/program": "shared cpu/core cpu/kernels/tables cpu/kernels cpu/gemm cpu/attention",
    "include/qfx": "",
    "c_api": "shared cpu/core cpu/kernels cpu/gemm cpu/program include/qfx",
    "cuda/core": "torch shared",
    "cuda/rows": "shared cuda/core",
    "cuda/gemm": "shared cuda/core cuda/rows",
    "cuda/gemv": "cuda/core cuda/rows cuda/gemm",
    "cuda/sm90": "torch cuda/core cuda/gemm",
    "cuda/ops": "shared cuda/core cuda/rows cuda/gemm cuda/gemv cuda/sm90",
    "api": "torch shared cpu/core cpu/kernels cpu/gemm cpu/attention cpu/ops cpu/program cuda/gemm",
    "python": "api",
}
INCLUDE = re.compile(r'^ *# *include (?:"([^"]*)"|<(torch/|ATen/|c10/)[^>]*>)', re.M)


def _files(csrc: Path) -> dict[str, str]:
    """Path from csrc -> text, of all that is compiled or included."""
    paths = sorted(p for p in csrc.rglob("*") if p.suffix in SUFFIXES)
    return {p.relative_to(csrc).as_posix(): p.read_text() for p in paths}


def _room_of(file: str) -> str:
    if file == "torch":
        return file
    return file.rpartition("/")[0] or "shared"


def _arrows(csrc: Path) -> dict[tuple[str, str], list[str]]:
    """(room, room that it includes) -> the includes, as `file: included file`."""
    found: dict[tuple[str, str], list[str]] = {}
    for file, text in _files(csrc).items():
        for ours, _ in INCLUDE.findall(text):
            arrow = _room_of(file), _room_of(ours or "torch")
            found.setdefault(arrow, []).append(f"{file}: {ours or 'torch'}")
    return {(a, b): lines for (a, b), lines in found.items() if a != b}


def _wrong(csrc: Path) -> list[str]:
    """The includes that no row allows."""
    allowed = {(room, below) for room, rest in ROOMS.items() for below in rest.split()}
    arrows = _arrows(csrc).items()
    return sorted(line for arrow, lines in arrows if arrow not in allowed for line in lines)


def test_every_file_has_a_room_and_every_room_a_file() -> None:
    assert {_room_of(file) for file in _files(CSRC)} == set(ROOMS) - {"torch"}


def test_rooms_include_what_their_row_names() -> None:
    assert _wrong(CSRC) == []


def test_no_row_names_what_its_room_does_not_include() -> None:
    named = {(room, below) for room, rest in ROOMS.items() for below in rest.split()}
    assert named - set(_arrows(CSRC)) == set()


def test_includes_go_down() -> None:
    order = list(ROOMS)
    rows = [(room, below) for room, rest in ROOMS.items() for below in rest.split()]
    assert [(a, b) for a, b in rows if order.index(b) >= order.index(a)] == []


def test_includes_are_written_from_csrc() -> None:
    files = _files(CSRC)
    ours = [(file, to) for file, text in files.items() for to, _ in INCLUDE.findall(text) if to]
    assert len(ours) > 300
    assert [pair for pair in ours if pair[1] not in files] == []


@pytest.mark.parametrize(
    ("file", "line", "seen"),
    [
        ("cpu/core/isa.cpp", '#include "cpu/kernels/selfcheck.h"', True),
        ("cpu/gemm/gemm.h", '#include "cpu/ops/arguments.h"', True),
        ("cpu/gemm/gemm.h", "#include <torch/csrc/stable/tensor.h>", True),
        ("cpu/kernels/rows/range.h", '# include "cpu/kernels/x86/tiles256.h"', True),
        ("cuda/gemm/gemm.h", '#include "cuda/sm90/config.h"', True),
        ("operands.h", '#include "cpu/core/pages.h"', True),
        ("cpu/new/file.h", '#include "types.h"', True),
        ("cpu/ops/linear.cpp", '#include "cpu/gemm/gemm.h"', False),
        ("cpu/core/isa.cpp", "#include <vector>", False),
    ],
)
def test_a_planted_include_is_seen(tmp_path: Path, file: str, line: str, seen: bool) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#pragma once\n\n{line}\n")
    assert (_wrong(tmp_path) != []) == seen
