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
from torch import nn

import qfx
from benchmarks.fresh import call
from benchmarks.question import Question, Row

LAYERS, BATCH, LENGTH, WORDS = 8, 8, 128, 8192
COMPILERS: dict[str, dict[str, Any]] = {
    "float32 Inductor": {},
    "qfx": {"backend": qfx.backend},
    "qfx, int8 backward": {"backend": qfx.backend, "options": {"backward": "int8"}},
}


def decoder(layers: int) -> nn.Module:
    """Returns OPT, random, with the width of opt-125m and a small vocabulary, without dropout."""
    from transformers import OPTConfig, OPTForCausalLM

    off: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0}
    return OPTForCausalLM(OPTConfig(vocab_size=WORDS, num_hidden_layers=layers, **off))


class Step:
    """One optimizer step of a compiled model on fixed tokens."""

    def __init__(self, compiler: str, layers: int) -> None:
        torch.manual_seed(0)
        self.model = decoder(layers)
        self.run = torch.compile(self.model, **COMPILERS[compiler])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(0, WORDS, (BATCH, LENGTH))

    def __call__(self) -> float:
        self.optimizer.zero_grad()
        loss = self.run(input_ids=self.tokens, labels=self.tokens).loss
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
