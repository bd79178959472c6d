"""Products of two computed operands: int8_bmm_dynamic on every ISA of this machine against
torch.matmul in float32, and int8_attention against F.scaled_dot_product_attention.

All run in one process, in turn. The layouts are those of attention: heads are slices of a token's
features. Scores are symmetric in int8, probabilities, which are not negative, asymmetric; an
attention of `products` is two such products with a softmax between.
    python -m benchmarks.bmm [--threads 1] [--heads 1x12x128x64,...] [--save]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from benchmarks.common import Candidate, interleaved, keep_memory, machine, save
from qfx import _C
from qfx.ops.code import Code

OPS = torch.ops.qfx
FLOAT = "float32"
Forms = dict[str, Callable[[], Tensor]]


@dataclass(frozen=True)
class Heads:
    """The sizes of self-attention with q, k, v [batch, heads, tokens, features]."""

    batch: int
    heads: int
    tokens: int
    features: int

    @classmethod
    def parse(cls, text: str) -> Heads:
        return cls(*map(int, text.split("x")))

    def __str__(self) -> str:
        return f"{self.batch}x{self.heads}x{self.tokens}x{self.features}"

    def random(self, generator: torch.Generator) -> Tensor:
        shape = (self.batch, self.tokens, self.heads, self.features)
        return torch.randn(shape, generator=generator).transpose(1, 2)


DEFAULT = [
    Heads(*sizes)
    for sizes in (
        (1, 12, 64, 32), (1, 12, 128, 32), (8, 12, 128, 32), (1, 12, 128, 64), (8, 12, 128, 64),
        (1, 12, 512, 64), (1, 12, 1024, 64), (4, 12, 256, 64), (1, 12, 384, 128),
    )
]  # fmt: skip


def int8_product(a: Tensor, b: Tensor, symmetric: bool) -> Tensor:
    """Multiplies a [*B, M, K] and b [*B, N, K] as the pass would."""
    return OPS.int8_bmm_dynamic(a, b, [1], 8, symmetric, 8, torch.float32)


@dataclass(frozen=True)
class Operands:
    """The operands of one attention: q including the factor 1 / sqrt(features), k, v, and the
    probabilities."""

    q: Tensor
    k: Tensor
    v: Tensor
    p: Tensor

    @classmethod
    def of(cls, heads: Heads) -> Operands:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (heads.random(generator) for _ in range(3))
        q = q * heads.features**-0.5
        return cls(q, k, v, (q @ k.mT).softmax(-1))

    def forms(self) -> dict[str, tuple[Forms, Forms]]:
        """Returns what is compared: name -> (float forms, int8 forms)."""
        return {
            "scores": (
                {FLOAT: lambda: self.q @ self.k.mT},
                {"": lambda: int8_product(self.q, self.k, True)},
            ),
            "values": (
                {FLOAT: lambda: self.p @ self.v},
                {"": lambda: int8_product(self.p, self.v.mT, False)},
            ),
            "attention": (
                {
                    FLOAT: lambda: F.scaled_dot_product_attention(self.q, self.k, self.v, scale=1),
                    "matmuls": lambda: (self.q @ self.k.mT).softmax(-1) @ self.v,
                },
                {"": self.int8_attention, "products": self.int8_products},
            ),
        }

    def int8_attention(self) -> Tensor:
        return OPS.int8_attention(self.q, self.k, self.v, None, 1.0, False, torch.float32)

    def int8_products(self) -> Tensor:
        scores = int8_product(self.q, self.k, True)
        return int8_product(scores.softmax(-1), self.v.mT, False)


def check_exact(x: Operands, isa: str) -> None:
    """Checks int8_bmm on `isa` against a float64 matmul of the integers, which is exact below
    2^53."""
    _C.set_isa(isa)
    for a, b in ((x.q, x.k), (x.p, x.v.mT)):
        a_q, _, zero_point = OPS.quantize(a, list(Code(symmetric=0)))
        b_q = OPS.quantize(b, list(Code()))[0]
        expected = (a_q.double() - zero_point.double()) @ b_q.double().mT
        wrong = int((OPS.int8_bmm(a_q, zero_point, b_q).double() != expected).sum())
        if wrong:
            raise AssertionError(f"{tuple(a.shape)} on {isa}: {wrong} products are wrong")


def measure(heads: Heads, rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each float form, and for each int8 form on each ISA except the portable
    one."""
    x = Operands.of(heads)
    isas = [isa for isa in _C.isas() if isa != "ref"]
    for isa in isas:
        check_exact(x, isa)
    rows = []
    for what, (floats, int8) in x.forms().items():
        candidates = {name: Candidate(run) for name, run in floats.items()}
        for isa, (name, run) in product(isas, int8.items()):
            candidates[f"{isa} {name}".strip()] = Candidate(run, partial(_C.set_isa, isa))
        times = interleaved(candidates, rounds)
        rows += [
            {
                "heads": str(heads),
                "what": what,
                "form": name,
                "median_us": round(time.median * 1e6, 1),
                "best_us": round(time.best * 1e6, 1),
                "speedup": round(times[FLOAT].median / time.median, 3),
            }
            for name, time in times.items()
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--heads", type=lambda s: [Heads.parse(v) for v in s.split(",")], default=DEFAULT
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    keep_memory()
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for heads in options.heads:
            rows += measure(heads, options.rounds)
    rows = [{**row, "threads": options.threads} for row in rows]
    print(machine())
    print(tabulate(rows, headers="keys"))
    if options.save:
        print(f"wrote {save('bmm', rows)}")


if __name__ == "__main__":
    main()
