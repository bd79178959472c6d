"""A session: where results are written, the rows so far, and the remaining time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Row = dict[str, Any]
MEBIBYTE = 2**20


@dataclass
class Session:
    """A run of the benchmarks. `dry`: on CPU tensors of tiny sizes, so that each stage's logic runs
    without a GPU."""

    out: Path
    deadline: float  # of time.monotonic()
    dry: bool = False
    rows: list[Row] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    @property
    def name(self) -> str:
        return "a dry run on the CPU" if self.dry else torch.cuda.get_device_name()

    @property
    def left(self) -> float:
        """The seconds until everything stops."""
        return self.deadline - time.monotonic()

    @property
    def past_l2(self) -> int:
        """The bytes of weights that no cache holds: a call reads them from memory each time."""
        return 2**12 if self.dry else 240 * MEBIBYTE

    def size(self, full: int) -> int:
        """Returns an extent of a matrix: as given, or a 64th of it in a dry run."""
        return max(full // 64, min(full, 16)) if self.dry else full

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=self.device)

    def add(self, stage: str, row: Row) -> None:
        """Adds a row and writes it to disk before anything else happens."""
        row = {"stage": stage, **row}
        self.rows.append(row)
        with (self.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def of(self, stage: str) -> list[Row]:
        return [row for row in self.rows if row["stage"] == stage]

    def run(self, stage: str, rows: Iterator[Row], budget: float) -> None:
        """Adds the rows of a stage until it ends or has used its seconds."""
        start, end = time.monotonic(), time.monotonic() + min(budget, self.left)
        for row in rows:
            self.add(stage, row)
            if time.monotonic() > end:
                self.add(stage, {"cut_after_s": round(budget), "why": "its time was up"})
                break
        print(f"{stage}: {time.monotonic() - start:.0f} s", flush=True)
