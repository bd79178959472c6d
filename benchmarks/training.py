"""A training step of an 8-layer transformer: float32 Inductor against qfx, time and memory.

Hidden size 768, 8 x 128 tokens, AdamW. Steps are timed in turns in one process. Memory is measured
in a process for each: the maximum that the step's tensors hold in addition to weights, gradients
and optimizer states, as counted by the profiler.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator
from statistics import median
from typing import Any

import qfx._C as _C
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qfx
from benchmarks.fresh import call
from benchmarks.question import Question, Row

HIDDEN, HEADS, LAYERS, BATCH, LENGTH, WORDS = 768, 12, 8, 8, 128, 8192
COMPILERS: dict[str, dict[str, Any]] = {
    "float32 Inductor": {},
    "qfx": {"backend": qfx.backend},
    "qfx, int8 backward": {"backend": qfx.backend, "options": {"backward": "int8"}},
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A decoder: tokens [B, L] -> the mean loss of predicting the next one."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.Sequential(*(Layer() for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.norm(self.layers(self.words(tokens))))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Step:
    """One optimizer step of a compiled model on fixed tokens."""

    def __init__(self, compiler: str, layers: int) -> None:
        torch.manual_seed(0)
        self.model = Model(layers)
        self.run = torch.compile(self.model, **COMPILERS[compiler])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(0, WORDS, (BATCH, LENGTH))

    def __call__(self) -> float:
        self.optimizer.zero_grad()
        loss = self.run(self.tokens)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def times(rounds: int, layers: int) -> dict[str, Row]:
    """Returns the median seconds of a step, measured in turn, and the loss after the same number of
    steps."""
    steps = {}
    for name in COMPILERS:
        steps[name] = Step(name, layers)
        steps[name]()
        torch._dynamo.reset_code_caches()
    samples: dict[str, list[float]] = {name: [] for name in steps}
    losses = {}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            losses[name] = step()
            samples[name].append(time.perf_counter() - start)
    return {n: {"step_s": median(s), "loss": losses[n]} for n, s in samples.items()}


def memory(compiler: str, layers: int) -> float:
    """Returns the maximum in megabytes held by the tensors of a step, above what lives between
    steps."""
    step = Step(compiler, layers)
    for _ in range(2):
        step()
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    held = most = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most / 2**20


def tables(options: Namespace) -> Iterator[list[Row]]:
    found = times(options.rounds, options.layers)
    base = found["float32 Inductor"]["step_s"]
    yield [
        {"model": name, "isa": _C.isa(), **row}
        | {"step_mb": call(memory, name, options.layers), "speed": round(base / row["step_s"], 3)}
        for name, row in found.items()
    ]


QUESTION = Question(
    "How long does a training step take, and how much memory?",
    tables,
    key=("model", "isa"),
    options={"layers": LAYERS},
    rounds=7,
)
