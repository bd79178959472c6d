"""Questions to a process that stays alive: lines of JSON."""

from __future__ import annotations

import json
import subprocess
from typing import Any

ANSWER = "# "  # what an answer begins with; other lines are printed by libraries


def ask(process: subprocess.Popen[str], question: Any) -> Any:
    """Returns the answer to a line of JSON. Raises RuntimeError, with what the process printed, if
    it ends instead."""
    asked, answers = process.stdin, process.stdout
    assert asked is not None and answers is not None
    asked.write(json.dumps(question) + "\n")
    asked.flush()
    printed = ""
    for line in answers:
        if line.startswith(ANSWER):
            return json.loads(line.removeprefix(ANSWER))
        printed += line
    raise RuntimeError(printed)
