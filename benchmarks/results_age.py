"""The age of saved figures: whether the code that they measured has changed since their commit."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT

OLD, UNKNOWN = " †", " ‡"
# Rows of these names measure other libraries; they do not age with this code.
OTHERS = (
    *("float", "bfloat16", "torch", "ONNX", "OpenVINO", "CTranslate2", "llama.cpp"),
    *("quanto", "bitsandbytes", "matmuls", "read", "copy", "clone"),
)
NAMES = ("candidate", "way", "library", "base", "setting", "model", "isa", "form", "case")
Row = dict[str, Any]


def ours(row: Row) -> bool:
    """Whether a row measured qfx."""
    return not any(str(row.get(name, "")).startswith(OTHERS) for name in NAMES)


@dataclass(frozen=True)
class Age:
    """Compares the code of a repository's last commit with that of earlier commits."""

    root: Path = ROOT
    known: dict[str, frozenset[str] | None] = field(default_factory=dict)

    def mark(self, row: Row, sources: Sequence[str]) -> str:
        """Returns OLD if one of `sources` (files, or folders with a slash) has changed since the
        row's commit, UNKNOWN if git does not know, nothing if they are the same."""
        files = self._changed(str(row["commit"]))
        if files is None:
            return UNKNOWN
        return OLD if any(file.startswith(tuple(sources)) for file in files) else ""

    def _changed(self, commit: str) -> frozenset[str] | None:
        if commit not in self.known:
            command = ["git", "diff", "--name-only", "--no-renames", commit, "HEAD", "--"]
            done = subprocess.run(command, cwd=self.root, capture_output=True, text=True)
            self.known[commit] = None if done.returncode else frozenset(done.stdout.splitlines())
        return self.known[commit]


class NoAge(Age):
    """Marks nothing: the page as it is compared, which later commits do not change."""

    def mark(self, row: Row, sources: Sequence[str]) -> str:
        return ""


def unmarked(text: str) -> str:
    return text.replace(OLD, "").replace(UNKNOWN, "")
