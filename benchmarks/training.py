"""A training step of an 8-layer transformer: float32 Inductor against qfx, time and memory.

Hidden size 768, 8 x 128 tokens, AdamW. Steps are timed in turns in one process. Memory is measured
in a process for each: the maximum that the step's tensors hold in addition to weights, gradients
and optimizer states, as counted by the profiler.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

import qfx
import qfx._C as _C
from benchmarks.common import Candidate, compiled_apart, interleaved
from benchmarks.fresh import call
from benchmarks.peak_memory import peak_mb
from benchmarks.question import Question, Row

LAYERS, BATCH, LENGTH = 8, 8, 128
SIZES: dict[str, Any] = {"vocab_size": 8192, "dropout": 0.0, "attention_dropout": 0.0}
COMPILERS: dict[str, Any] = {
    "float32 Inductor": "inductor",
    "qfx": qfx.backend,
    "qfx, int8 backward": partial(qfx.backend, options={"backward": "int8"}),
}


def decoder(layers: int) -> nn.Module:
    """Returns OPT, random, with the width of opt-125m and a small vocabulary, without dropout."""
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(OPTConfig(**{**SIZES, "num_hidden_layers": layers}))


class Step:
    """One optimizer step of a compiled model on fixed tokens."""

    def __init__(self, compiler: str, layers: int) -> None:
        torch.manual_seed(0)
        self.model = decoder(layers)
        self.run = compiled_apart(self.model, COMPILERS[compiler])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(0, SIZES["vocab_size"], (BATCH, LENGTH))

    def __call__(self) -> float:
        self.optimizer.zero_grad()
        loss = self.run(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def memory(compiler: str, layers: int) -> float:
    """Returns the maximum in megabytes held by the tensors of a step, above what lives between
    steps."""
    step = Step(compiler, layers)
    for _ in range(2):
        step()
    return peak_mb(step)


def tables(options: Namespace) -> Iterator[list[Row]]:
    """Yields medians, and the loss after the same number of steps."""
    steps = {name: Step(name, options.layers) for name in COMPILERS}
    times = interleaved({name: Candidate(step) for name, step in steps.items()}, options.rounds)
    baseline, *_ = times.values()
    yield [
        {"model": name, "isa": _C.isa(), "step_s": time, "loss": steps[name]()}
        | {"step_mb": call(memory, name, options.layers)}
        | {"speed": round(baseline / time, 3)}
        for name, time in times.items()
    ]


QUESTION = Question(
    "How long does a training step take, and how much memory?",
    tables,
    key=("model", "isa"),
    options={"layers": LAYERS},
    rounds=5,
)
