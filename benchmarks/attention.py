"""int8_attention and its gradients on every instruction set of this machine, against
F.scaled_dot_product_attention in float32.

All take turns. With one thread the times are processor seconds, so that other processes matter
less.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.common import Candidate, clock, interleaved, keep_memory
from benchmarks.question import Question, Row, chosen
from qfx import _C


class Shape(NamedTuple):
    """The sizes of q [batch, heads, tokens, d], and of k and v with `of_keys` heads."""

    batch: int
    heads: int
    of_keys: int
    tokens: int
    d: int
    causal: bool = False
    padded: bool = False

    def __str__(self) -> str:
        return f"{self.batch}x{self.heads}/{self.of_keys}x{self.tokens}x{self.d}"


CASES = {
    **{str(n): Shape(1, 12, 12, n, 64) for n in (64, 128, 256, 512, 1024)},
    **{str(n): Shape(1, 4, 4, n, 64) for n in (2048, 4096)},
    "MiniLM": Shape(8, 12, 12, 128, 32, padded=True),
    "ViT": Shape(1, 12, 12, 197, 64),
    "Whisper": Shape(1, 8, 8, 1500, 64),
    "SmolLM2": Shape(1, 9, 3, 512, 64, causal=True),
    "Llama": Shape(1, 32, 8, 512, 128, causal=True),
}


class Forms(NamedTuple):
    exact: Callable[[], Any]
    int8: Callable[[], Any]


def forms(of: Shape) -> dict[str, Forms]:
    """Returns attention in float32 and in int8, and their gradients. Heads are slices of a token's
    features, as in models; padded sequences have half to all of the tokens."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(of.batch, of.tokens, heads, of.d, generator=generator).transpose(1, 2)
        for heads in (of.heads, of.of_keys, of.of_keys)
    )
    lengths = torch.linspace(of.tokens // 2, of.tokens, of.batch).long()
    padding = (torch.arange(of.tokens) < lengths[:, None])[:, None, None]
    mask = padding if of.padded else None
    how, ops = (mask, of.d**-0.5, of.causal), torch.ops.qfx
    exact: Any = partial(F.scaled_dot_product_attention, is_causal=of.causal, enable_gqa=True)
    forward = Forms(
        torch.no_grad()(partial(exact, q, k, v, mask)),
        partial(ops.int8_attention, q, k, v, *how, torch.float32),
    )
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    y = exact(*leaves, mask)
    grad = torch.randn(y.shape, generator=generator)
    backward = Forms(
        partial(torch.autograd.grad, y, leaves, grad, retain_graph=True),
        partial(ops.int8_attention_backward, grad, q, k, v, *how),
    )
    return {"": forward, ", backward": backward}


def measure(name: str, which: str, form: Forms, rounds: int) -> list[Row]:
    """Returns a row for each instruction set."""
    isas = [isa for isa in _C.isas() if isa != "ref"]
    ways = {"float32": Candidate(form.exact)}
    ways |= {isa: Candidate(form.int8, partial(_C.set_isa, isa)) for isa in isas}
    times = interleaved(ways, rounds, clock())
    in_float = times.pop("float32")
    return [
        {"case": f"{name}{which}", "shape": str(CASES[name]), "isa": isa}
        | {"float us": round(in_float * 1e6, 1), "us": round(taken * 1e6, 1)}
        | {"of float": round(in_float / taken, 2)}
        for isa, taken in times.items()
    ]


def tables(options: Namespace) -> Iterator[list[Row]]:
    keep_memory()
    for name in chosen(options.cases, CASES):
        for which, form in forms(CASES[name]).items():
            yield measure(name, which, form, options.rounds)


QUESTION = Question(
    "How fast is int8 attention, compared with float32?",
    tables,
    key=("case", "isa"),
    options={"cases": list(CASES)},
)
