"""Measures the cost tables of this machine's instruction sets on one thread, as defaults of their
families in qfx/cost/defaults. They are used if a machine has had no time to measure its own.

    python -m benchmarks.default_tables [avx2 avx512vnni ...] [--kinds attentions ...]
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
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

TYPES = ("float32", "bfloat16", "float16")
_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
LIBRARIES = {  # settings by which float libraries keep to a family's instructions
    "avx2": _AVX2 | {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avxvnni": _AVX2 | {"ONEDNN_MAX_CPU_ISA": "AVX2_VNNI"},
}
DIGITS = 3  # of a time: tables of other machines are not more exact


def tables(dtype: torch.dtype, kinds: Sequence[str]) -> dict[str, Any]:
    """Returns the tables of these kinds of work of one dtype, rounded."""
    found = {}
    for kind in kinds:
        text = LiveTable(KINDS[kind], dtype).whole().text()
        found[kind] = json.loads(text, parse_float=lambda s: float(f"{float(s):.{DIGITS}g}"))
        found[kind]["spread"] = 0.0
    return found


def write(isa: str, kinds: Sequence[str]) -> None:
    """Writes these kinds of work to the file of one instruction set, which keeps others."""
    torch.set_num_threads(1)
    _C.set_isa(isa)
    tune_kernels()
    path = FOLDER / f"{isa}.json"
    path.parent.mkdir(exist_ok=True)
    before = json.loads(path.read_text()) if path.exists() else {}
    with unlimited():
        found = {name: tables(getattr(torch, name), kinds) for name in TYPES}
    kept = {name: {**before.get(name, {}), **each} for name, each in found.items()}
    path.write_text(json.dumps(kept, separators=(",", ":")) + "\n")


def main(isas: Sequence[str], kinds: Sequence[str]) -> None:
    """Writes one file for each instruction set, in a process whose float libraries are limited to
    the instructions of a processor of that family."""
    for isa in isas:
        call(write, isa, kinds, environment=LIBRARIES.get(isa, {}))


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("isas", nargs="*", default=[isa for isa in _C.isas() if isa != "ref"])
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS])
    main(**vars(parser.parse_args()))
