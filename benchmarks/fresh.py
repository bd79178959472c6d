"""Runs a benchmark in a fresh process whose last line is JSON; a failure becomes a sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.common import ROOT


class FailedError(Exception):
    """Raised if the process ended in an error. The message is its last line, or the signal."""


def in_a_process(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Runs a module and returns the JSON of its last line. `environment`: variables in addition to
    those of this process."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})},
        capture_output=True,
        text=True,
    )
    if done.returncode < 0:
        raise FailedError(f"ended by {signal.Signals(-done.returncode).name}")
    if done.returncode:
        raise FailedError(["", *done.stderr.strip().splitlines()][-1])
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]
