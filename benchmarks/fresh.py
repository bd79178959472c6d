"""Functions that run in a fresh process; a failure becomes a sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch

from benchmarks.common import ROOT


class FailedError(Exception):
    """Raised if the process ended in an error. The message is its last line, or the signal."""


def call(
    function: Callable[..., Any],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    limit_s: float | None = None,
) -> Any:
    """Calls a module's function in a fresh process, with as many threads as this one has.
    Arguments and result pass as JSON. `environment`: variables in addition to those of this
    process. Raises FailedError, also after `limit_s` seconds."""
    spec = sys.modules[function.__module__].__spec__  # that of a program has its name
    assert spec is not None
    given = (spec.name, function.__name__, json.dumps(arguments), str(torch.get_num_threads()))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.fresh", *given],
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})},
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        raise FailedError(f"stopped after {limit_s:.0f} s") from None
    if done.returncode < 0:
        raise FailedError(f"ended by {signal.Signals(-done.returncode).name}")
    if done.returncode:
        raise FailedError(["", *done.stderr.strip().splitlines()][-1])
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    where, name, given, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    print(json.dumps(getattr(import_module(where), name)(*json.loads(given))))
