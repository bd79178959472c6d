"""Helpers of all benchmarks: interleaved timing, a description of the machine, saved results."""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from qfx.io.atomic_write import write_text

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Clock = Callable[[], float]
SAMPLE_SECONDS = 2e-3  # the shortest sample: far above the clock's and the call's own cost
INT8_FLAGS = ("avx2", "avx_vnni", "avx512_vnni", "amx_int8", "asimddp", "i8mm", "sve")


@dataclass(frozen=True)
class Candidate:
    """A function to time. `run` is timed; `prepare` is called before each sample, untimed."""

    run: Callable[[], Any]
    prepare: Callable[[], Any] = lambda: None


def keep_memory() -> None:
    """Makes glibc keep freed memory in this process. Otherwise outputs of megabytes, float and int8
    alike, would be timed together with the page faults of allocating them at each call."""
    m_trim_threshold, m_mmap_threshold = -1, -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(m_mmap_threshold, 2**30)
        mallopt(m_trim_threshold, 2**30)


def interleaved(
    candidates: Mapping[str, Candidate], rounds: int, clock: Clock = time.perf_counter
) -> dict[str, float]:
    """Returns the median of the seconds of each candidate."""
    return {name: median(s) for name, s in sampled(candidates, rounds, clock).items()}


def sampled(
    candidates: Mapping[str, Candidate], rounds: int, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Times all candidates in turn, `rounds` times, so that a drift of the machine's speed affects
    them alike. A sample repeats a call until it lasts SAMPLE_SECONDS."""
    repeats = {name: _repeats(c) for name, c in candidates.items()}
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, candidate in candidates.items():
            samples[name].append(_sample(candidate, repeats[name], clock))
    return samples


def _repeats(candidate: Candidate) -> int:
    _sample(candidate, 1)  # the first call packs, plans or allocates
    return max(1, round(SAMPLE_SECONDS / _sample(candidate, 1)))


def _sample(candidate: Candidate, repeats: int, clock: Clock = time.perf_counter) -> float:
    candidate.prepare()
    candidate.run()  # after another candidate's turn: caches and branch predictors
    start = clock()
    for _ in range(repeats):
        candidate.run()
    return (clock() - start) / repeats


def clock() -> Clock:
    """Returns the clock of processor seconds if there is one thread, because other processes
    disturb it less; that of elapsed seconds if there are several."""
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def read_gb_s(megabytes: int, rounds: int = 5) -> float:
    """Returns the rate at which torch reads memory of this size, by the faster of two sums."""
    buffer = torch.ones(megabytes << 18)
    sums = {"float32": buffer.sum, "int64": buffer.view(torch.int64).sum}
    times = interleaved({name: Candidate(run) for name, run in sums.items()}, rounds, clock())
    return buffer.nbytes / min(times.values()) / 1e9


def compiled_apart(model: nn.Module, backend: Any) -> Callable[..., Any]:
    """Compiles a model by itself: Dynamo would reuse the code of another compilation of the same
    class. PyTorch 2.11 has no option for that."""
    known = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    apart: dict[str, Any] = {"isolate_recompiles": True} if known else {}
    return torch.compile(model, backend=backend, **apart)


def cpu_seconds() -> float:
    """Returns the processor seconds of this process, and of the compilers that it has started and
    waited for."""
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


def machine() -> dict[str, Any]:
    """Returns what figures depend on besides the code: the CPU, its int8 instructions, torch,
    commit."""
    cpu = _cpuinfo()
    # Results, and their page, are written while others are measured.
    elsewhere = ("--", ".", ":!benchmarks/results", ":!docs/results.md")
    flags = set((cpu.get("flags") or cpu.get("Features") or "").split())
    return {
        "cpu": cpu.get("model name") or platform.processor() or platform.machine(),
        "family_model": [
            cpu.get("cpu family") or cpu.get("CPU implementer"),
            cpu.get("model") or cpu.get("CPU part"),
        ],
        "flags": [f for f in INT8_FLAGS if f in flags],
        "cores": torch.multiprocessing.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", *elsewhere)),
    }


def _cpuinfo() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    first = path.read_text().split("\n\n")[0] if path.exists() else ""
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _git(*arguments: str) -> str | None:
    """Returns the output of git, or None outside a repository and before the first commit."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def slug(host: Mapping[str, Any]) -> str:
    """Returns a file name for the CPU. Hypervisors hide names, so family and model are appended if
    known."""
    words = [host["cpu"], *(v for v in host["family_model"] if v)]
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def stored(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the machine of a saved file, and its rows. A row without a number of threads, a
    commit, or a word on uncommitted changes gets those of the machine."""
    host, rows = (json.loads(path.read_text())[key] for key in ("machine", "rows"))
    origin = {key: host.get(key) for key in ("threads", "commit", "uncommitted_changes")}
    return host, [{**origin, **row} for row in rows]


def merge(benchmark: str, rows: list[dict[str, Any]], key: Sequence[str]) -> Path:
    """Writes benchmarks/results/<cpu>-<benchmark>.json: the machine, then one row a line. It keeps
    rows saved before, except those that agree with a new row on `key`. A row with a `reason`
    instead of figures replaces no row with figures. The file's machine is that of the last writer,
    so rows contain what may differ: commit and threads."""

    def keys(of: list[dict[str, Any]]) -> list[list[Any]]:
        return [[row.get(k) for k in key] for row in of]

    host = machine()
    path = RESULTS / f"{slug(host)}-{benchmark}.json"
    before = stored(path)[1] if path.exists() else []
    measured = keys([row for row in before if "reason" not in row])
    new = [
        r for r, k in zip(rows, keys(rows), strict=True) if "reason" not in r or k not in measured
    ]
    kept = [r for r, k in zip(before, keys(before), strict=True) if k not in keys(new)]
    lines = ",\n".join(json.dumps(row) for row in kept + new)
    RESULTS.mkdir(parents=True, exist_ok=True)
    write_text(path, f'{{"machine": {json.dumps(host)},\n"rows": [\n{lines}\n]}}\n')
    return path
