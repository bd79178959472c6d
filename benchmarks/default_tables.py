"""Measures the cost tables of this machine's instruction sets on one thread, as defaults of their
families in qfx/cost/defaults. They are used if a machine has had no time to measure its own.

    python -m benchmarks.default_tables [avx2 avx512vnni ...]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.fresh import call
from qfx import _C
from qfx.cost.default_tables import FOLDER
from qfx.cost.kernels import tune_kernels
from qfx.cost.live_table import LiveTable
from qfx.cost.spending import unlimited
from qfx.cost.workloads import KINDS

TYPES = (torch.float32, torch.bfloat16, torch.float16)
_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
LIBRARIES = {  # settings by which float libraries keep to a family's instructions
    "avx2": _AVX2 | {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avxvnni": _AVX2 | {"ONEDNN_MAX_CPU_ISA": "AVX2_VNNI"},
}
DIGITS = 3  # of a time: tables of other machines are not more exact


def tables(dtype: torch.dtype) -> dict[str, Any]:
    """Returns the tables of all kinds of work of one dtype, rounded."""
    found = {}
    for kind, workload in KINDS.items():
        text = LiveTable(workload, dtype).whole().text()
        found[kind] = json.loads(text, parse_float=lambda s: float(f"{float(s):.{DIGITS}g}"))
        found[kind]["spread"] = 0.0
    return found


def write(isa: str) -> None:
    """Writes the file of one instruction set."""
    torch.set_num_threads(1)
    _C.set_isa(isa)
    tune_kernels()
    with unlimited():
        found = {str(dtype).split(".")[-1]: tables(dtype) for dtype in TYPES}
    path = FOLDER / f"{isa}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(found, separators=(",", ":")) + "\n")


def main(isas: Sequence[str]) -> None:
    """Writes one file for each instruction set, in a process whose float libraries are limited to
    the instructions of a processor of that family."""
    for isa in isas:
        call(write, isa, environment=LIBRARIES.get(isa, {}))


if __name__ == "__main__":
    main(sys.argv[1:] or [isa for isa in _C.isas() if isa != "ref"])
