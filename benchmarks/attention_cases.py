"""Attentions of the shapes of models, in float and in int8, here and in another build of qfx."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qfx import _C

# A process of another checkout: reads a line, runs, writes a line.
WORKER = """
import json, sys, time, torch
import qfx
from qfx import _C
torch.set_num_threads(int(sys.argv[1]))
clock = time.process_time if sys.argv[1] == "1" else time.perf_counter
for line in sys.stdin:
    path, isa, out, seconds = json.loads(line)
    q, k, v, mask, causal = torch.load(path)
    _C.set_isa(isa)
    def run():
        how = (mask, q.shape[-1] ** -0.5, causal, torch.float32)
        return torch.ops.qfx.int8_attention(q, k, v, *how)
    with torch.inference_mode():
        torch.save(run(), out)
        run()
        started, count = clock(), 0
        while count == 0 or clock() - started < seconds:
            run()
            count += 1
        spent = (clock() - started) / count
    print(json.dumps(spent), flush=True)
"""


@dataclass(frozen=True)
class Case:
    """One attention: q [*B, H, M, D], k, v [*B, G, N, D], with heads split off a token's features
    as models do."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    causal: bool = False

    @classmethod
    def random(cls, name: str, batch: int, heads: int, tokens: int, d: int, **how: Any) -> Case:
        of_keys, generator = how.pop("of_keys", heads), torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(batch, tokens, h, d, generator=generator).transpose(1, 2)
            for h in (heads, of_keys, of_keys)
        )
        return cls(name, q, k, v, **how)

    @property
    def shape(self) -> str:
        heads = (f"{self.q.shape[-3]}/{self.k.shape[-3]}", *map(str, self.q.shape[-2:]))
        return "x".join((str(self.q.shape[0]), *heads))

    def in_float(self) -> Tensor:
        return F.scaled_dot_product_attention(
            self.q, self.k, self.v, self.mask, is_causal=self.causal, enable_gqa=True
        )

    def in_int8(self) -> Tensor:
        how = (self.mask, self.q.shape[-1] ** -0.5, self.causal, torch.float32)
        return torch.ops.qfx.int8_attention(self.q, self.k, self.v, *how)

    def exact(self) -> Tensor:
        mask = (
            self.mask.double()
            if self.mask is not None and self.mask.is_floating_point()
            else self.mask
        )
        doubles = replace(self, q=self.q.double(), k=self.k.double(), v=self.v.double(), mask=mask)
        return doubles.in_float()


def padding(batch: int, tokens: int) -> Tensor:
    """Returns a mask for sequences of half to all of the tokens."""
    lengths = torch.linspace(tokens // 2, tokens, batch).long()
    return (torch.arange(tokens) < lengths[:, None])[:, None, None]


def shapes() -> Iterator[Case]:
    for tokens in (64, 128, 256, 512, 1024, 2048, 4096):
        yield Case.random(str(tokens), 1, 12 if tokens <= 1024 else 4, tokens, 64)
    yield Case.random("MiniLM", 8, 12, 128, 32, mask=padding(8, 128))
    yield Case.random("ViT", 1, 12, 197, 64)
    yield Case.random("Whisper", 1, 8, 1500, 64)
    yield Case.random("SmolLM2", 1, 9, 512, 64, of_keys=3, causal=True)
    yield Case.random("Llama", 1, 32, 512, 128, of_keys=8, causal=True)


# --- another build ---


class Other:
    """int8_attention of another checkout, run in a process of its own."""

    def __init__(self, checkout: Path, threads: int) -> None:
        python = checkout / ".venv/bin/python"
        self.process = subprocess.Popen(
            [python, "-c", WORKER, str(threads)], cwd=checkout,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.folder = tempfile.TemporaryDirectory()
        self.isas = _C.isas()

    def load(self, case: Case) -> None:
        """Passes the case to the process. Shared keys are repeated, because the other build does
        not support them."""
        k, v = (t.repeat_interleave(case.q.shape[-3] // t.shape[-3], -3) for t in (case.k, case.v))
        torch.save((case.q, k, v, case.mask, case.causal), self._file("in"))

    def run(self, isa: str, seconds: float = 0.0) -> tuple[float, Tensor]:
        """Returns the seconds of a call, and its result."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps([self._file("in"), isa, self._file("out"), seconds]),
              file=self.process.stdin, flush=True)  # fmt: skip
        return json.loads(self.process.stdout.readline()), torch.load(self._file("out"))

    def attend(self, case: Case) -> Tensor:
        self.load(case)
        return self.run(_C.isa())[1]

    def _file(self, name: str) -> str:
        return str(Path(self.folder.name) / name)
