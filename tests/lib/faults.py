"""Processes that are killed, or whose disk is full, at the n-th system call that changes a file."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("faults.c")


class Kind(IntEnum):
    """The kind of fault. COUNT: nothing fails. KILL: SIGKILL before the n-th call; a write counts
    twice, and the second time half of it is written. ERROR: only the n-th call fails. FULL: from
    the n-th call on, all calls fail that a full disk makes fail. The error is ENOSPC, for locks
    ENOLCK."""

    COUNT = 0
    KILL = 1
    ERROR = 2
    FULL = 3


class Ended(NamedTuple):
    """The end of a process: whether it was killed, how many calls it made, and its OSError as
    text."""

    killed: bool
    calls: int
    error: str


def with_faults(module: str, folder: Path) -> subprocess.CompletedProcess[str] | None:
    """Runs a module of the tests with `folder` as argument, in a process in which `ended` works.
    Returns None without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        return None
    library = folder / "faults.so"
    build = [compiler, "-shared", "-fPIC", "-O1", "-w", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(build, check=True)
    several = {"LD_PRELOAD": str(library), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, str(folder)]
    done = subprocess.run(command, env={**os.environ, **several}, capture_output=True, text=True)
    return done


def ended(action: Callable[[], object], kind: Kind, at: int = 0) -> Ended:
    """Forks a process that runs `action`, in which call number `at`, counted from 1, fails."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        _run(action, kind, at, write)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    _, status = os.waitpid(process, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0, f"{kind.name} at {at}: {said}"
    calls, _, error = said.partition(" ")
    return Ended(killed, int(calls or at), error)


def _run(action: Callable[[], object], kind: Kind, at: int, pipe: int) -> None:
    library, error, status = ctypes.CDLL(None), "", 1
    try:
        library.faults_begin(at, int(kind))
        try:
            action()
        except OSError as why:
            error = str(why)
        calls = library.faults_end()
        os.write(pipe, f"{calls} {error}".encode())
        status = 0
    except BaseException as why:
        os.write(pipe, f"0 {why!r}".encode())
    finally:
        os._exit(status)
