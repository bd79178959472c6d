"""Default cost tables of a family of processors, used where this machine was not measured.

qfx/cost/defaults/<instruction set>.json holds single-thread tables of one processor of the family,
written by `python -m benchmarks.default_tables`. They indicate about how much int8 gains, not how
long a call takes on this machine.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from qfx.cost.table import Table
from qfx.cost.workloads import KINDS

FOLDER = Path(__file__).parent / "defaults"
# The nearest instruction set that was measured, for those that were not.
NEAREST = {
    "amx": "avx512vnni",
    "avxvnniint8": "avxvnni",
    "neoni8mm": "avxvnni",
    "neondot": "avxvnni",
    "neon": "avx2",
}


def family_of(isa: str) -> str | None:
    """Returns the instruction set whose default cost tables are used for the instruction set
    `isa`; None if the package has no tables for it, as for the portable kernels ("ref")."""
    name = NEAREST.get(isa, isa)
    return name if (FOLDER / f"{name}.json").exists() else None


@lru_cache
def default_table(kind: str, dtype: torch.dtype, isa: str) -> Table | None:
    """Returns the default table for this kind of work and dtype; None if the family of processors
    has none."""
    family = family_of(isa)
    raw = None if family is None else _tables(family).get(str(dtype).split(".")[-1], {}).get(kind)
    return None if raw is None else KINDS[kind].read(json.dumps(raw))


@lru_cache
def _tables(family: str) -> dict[str, Any]:
    tables: dict[str, Any] = json.loads((FOLDER / f"{family}.json").read_text())
    return tables
