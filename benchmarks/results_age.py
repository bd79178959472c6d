"""The age of saved figures: whether the code that they measured has changed since their commit."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common import ROOT

OLD, UNKNOWN = " †", " ‡"


@dataclass(frozen=True)
class Age:
    """Compares the code of a repository's last commit with that of earlier commits."""

    root: Path = ROOT
    known: dict[str, frozenset[str] | None] = field(default_factory=dict)

    def mark(self, commit: str, sources: Sequence[str]) -> str:
        """Returns OLD if one of `sources` (files, or folders with a slash) has changed since the
        commit, UNKNOWN if git does not know, nothing if they are the same."""
        if commit not in self.known:
            command = ["git", "diff", "--name-only", "--no-renames", commit, "HEAD", "--"]
            done = subprocess.run(command, cwd=self.root, capture_output=True, text=True)
            self.known[commit] = None if done.returncode else frozenset(done.stdout.splitlines())
        files = self.known[commit]
        if files is None:
            return UNKNOWN
        return OLD if any(file.startswith(tuple(sources)) for file in files) else ""


TODAY = Age()


def unmarked(text: str) -> str:
    return text.replace(OLD, "").replace(UNKNOWN, "")
