"""Reads the machine code of x86-64 object files with binutils."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
_INSTRUCTION = re.compile(r"^ *([0-9a-f]+):\t((?:[0-9a-f]{2} )+) *\t(?:\{vex\} )?(\S+) *(.*)$")
# The purpose of a kernel's inner loop; the 1-bit kernels count with vpopcntd or look up.
_MULTIPLY = re.compile(r"vpmaddubsw|vpdp[a-z]+|tdp[a-z]+|vfmadd[a-z0-9]+|vpopcnt[a-z]+|vpshufb")
_VECTOR = re.compile(r"\b[xyz]mm\d+")
# From a vector register to a general one or back: GCC keeps an address there.
_KEPT_IN_VECTOR = re.compile(r"(?:xmm\d+,[er]\w+|[er]\w+,xmm\d+)$")
# The first byte of VEX (c4, c5) and EVEX (62) instructions, after address prefixes.
_WIDE = re.compile(r"(?:(?:26|2e|36|3e|64|65|67) )*(?:c4|c5|62) ")


@dataclass(frozen=True)
class Instruction:
    address: int
    code: str  # bytes in hexadecimal
    name: str
    operands: str

    def __str__(self) -> str:
        return f"{self.address:x}: {self.name} {self.operands}"

    @property
    def is_wide(self) -> bool:
        """Whether the instruction needs AVX or later."""
        return _WIDE.match(self.code) is not None

    @property
    def jumps_to(self) -> int | None:
        target = re.match(r"([0-9a-f]+) <", self.operands)
        return int(target[1], 16) if target and self.name.startswith("j") else None


@dataclass(frozen=True)
class Function:
    name: str
    body: tuple[Instruction, ...]

    @cached_property
    def _stack(self) -> re.Pattern[str]:
        """A pattern of memory operands on the stack. Without a frame, rbp may be a pointer like any
        other."""
        framed = any((i.name, i.operands) == ("mov", "rbp,rsp") for i in self.body)
        return re.compile(r"\[(?:rsp|rbp)" if framed else r"\[rsp")

    def hot_loops(self) -> list[list[Instruction]]:
        """Returns the innermost loops that multiply. A loop is the code that a jump jumps back
        over."""
        spans = {(i.jumps_to, i.address) for i in self.body if i.jumps_to is not None}
        first = self.body[0].address
        loops = [(head, end) for head, end in spans if first <= head <= end]
        inner = [
            (head, end)
            for head, end in loops
            if not any((h, e) != (head, end) and head <= h and e <= end for h, e in loops)
        ]
        bodies = [[i for i in self.body if head <= i.address <= end] for head, end in sorted(inner)]
        return [body for body in bodies if any(_MULTIPLY.match(i.name) for i in body)]

    def calls(self, name: str) -> bool:
        return any(i.name in ("call", "jmp") and name in i.operands for i in self.body)

    def spills(self) -> list[Instruction]:
        """Returns the moves of vector registers to or from the stack in hot loops, and those of
        general registers to or from vector registers."""
        return [
            i
            for loop in self.hot_loops()
            for i in loop
            if (self._stack.search(i.operands) and _VECTOR.search(i.operands))
            or (i.name in ("vmovq", "vmovd") and _KEPT_IN_VECTOR.match(i.operands))
        ]


def _binutils(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def functions_of(path: Path) -> list[Function]:
    listing = _binutils("objdump", "-d", "-C", "--wide", "-M", "intel", str(path))
    found: dict[str, list[Instruction]] = {}
    name = ""
    for line in listing.splitlines():
        if function := _FUNCTION.match(line):
            name = function[1]
        elif instruction := _INSTRUCTION.match(line):
            address, code, mnemonic, operands = instruction.groups()
            found.setdefault(name, []).append(
                Instruction(int(address, 16), code, mnemonic, operands)
            )
    return [Function(name, tuple(body)) for name, body in found.items()]


def shared_functions_of(path: Path) -> list[str]:
    """Returns the functions that may also be defined elsewhere, so that the linker chooses one:
    weak, unique or indirect."""
    symbols = re.findall(r"^\S+ ([WuiI]) (.*)$", _binutils("nm", "-C", str(path)), re.MULTILINE)
    return [name for _, name in symbols]


def exports_of(path: Path) -> list[str]:
    return re.findall(r"^\S+ T (.*)$", _binutils("nm", "-C", str(path)), re.MULTILINE)


def has_static_initializer(path: Path) -> bool:
    return re.search(r" \.(?:init_array|ctors)", _binutils("objdump", "-h", str(path))) is not None
