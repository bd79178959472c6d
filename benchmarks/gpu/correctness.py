"""Correctness: the CPU's kernels, each GPU kernel in a process of its own, and the sanitizer."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

from benchmarks.common import ROOT
from benchmarks.gpu.kernels import PORTABLE, VARIABLE, named
from benchmarks.gpu.session import Row, Session

LIMIT = 20.0  # seconds of a kernel that is right, and of the machine's that one that hangs costs
CPU_TESTS, CPU_LIMIT = "kernel_equals_reference", 45.0
SLOWED = 40.0  # the same with every access checked


def on_cpu(session: Session) -> Iterator[Row]:
    """Runs the tests of the kernels for this machine's CPU."""
    if importlib.util.find_spec("pytest") is None:
        yield {"what": "CPU kernels", "result": "skipped: no pytest"}
        return
    which = f"{CPU_TESTS} and binary_pack" if session.dry else CPU_TESTS
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    limit = _limit(session, CPU_LIMIT)
    done = _within([*pytest, "tests/ops/test_op_parts.py", "-k", which], limit)
    if done is None:
        yield {"what": "CPU kernels", "result": f"not done within {limit:.0f} s"}
        return
    last = (done.stdout.strip().splitlines() or [""])[-1]
    yield {"what": "CPU kernels", "ok": done.returncode == 0, "result": last}


def of_kernels(session: Session) -> Iterator[Row]:
    """Compares each kernel with exact sums. `ok`: whether the following stages time it."""
    for operands in ("s8", "b1"):
        for kernel in [PORTABLE, *named(operands)]:
            if session.dry and kernel != PORTABLE:
                continue
            yield {"operands": operands, "kernel": kernel, **_checked(session, operands, kernel)}


def _checked(session: Session, operands: str, kernel: str) -> Row:
    command = [*_check(operands), "--device", session.device.type]
    limit = _limit(session, LIMIT)
    done = _within([*command, *(["--tiny"] if session.dry else [])], limit, kernel)
    if done is None:
        return {"ok": False, "result": f"did not return within {limit:.0f} s"}
    if done.returncode not in (0, 1) or not done.stdout.strip():
        error = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"ok": False, "result": f"exit status {done.returncode}: {error}"}
    return {"ok": done.returncode == 0, **json.loads(done.stdout.splitlines()[-1])}


def right(session: Session, operands: str) -> list[str]:
    """Returns the kernels that this stage found correct."""
    rows = session.of("kernels")
    return [row["kernel"] for row in rows if row.get("operands") == operands and row["ok"]]


def sanitized(session: Session) -> Iterator[Row]:
    """Runs compute-sanitizer on small shapes of the portable kernels and of one for Hopper."""
    tool = shutil.which("compute-sanitizer")
    if tool is None or session.dry:
        why = "a dry run" if session.dry else "not on the PATH"
        yield {"what": "compute-sanitizer", "result": f"skipped: {why}"}
        return
    for operands, kernel in (("s8", PORTABLE), ("s8", "s8_swap16"), ("b1", PORTABLE)):
        command = [tool, "--tool", "memcheck", *_check(operands), "--tiny"]
        done = _within(command, min(SLOWED, session.left), kernel)
        result = (done.stdout.strip().splitlines() or [""])[-1] if done else "time limit"
        yield {"what": f"memcheck {kernel}", "ok": bool(done and not done.returncode),
               "result": result}  # fmt: skip


def _limit(session: Session, seconds: float) -> float:
    """Returns the seconds that a command may take: in a dry run all that are left, because the
    machine may be busy."""
    return session.left if session.dry else min(seconds, session.left)


def _check(operands: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu.check", operands]


def _within(
    command: Sequence[str], limit: float, kernel: str | None = None
) -> subprocess.CompletedProcess[str] | None:
    """Returns the completed process, or None if it had to be killed."""
    more = {} if kernel is None else {VARIABLE: kernel}
    how = {"cwd": ROOT, "env": {**os.environ, **more}}
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=limit, **how)  # type: ignore[call-overload,no-any-return]
    except subprocess.TimeoutExpired:
        return None
