"""A training step of an 8-layer transformer: float32 Inductor against qfx, time and memory.

`python -m benchmarks.training [--save]`. Hidden size 768, 8 x 128 tokens, AdamW, one thread. Steps
are timed in turns in one process. Memory is measured in a process for each: the maximum that the
step's tensors hold in addition to weights, gradients and optimizer states (as counted by the
profiler), and the peak resident memory of the process after compilation.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from statistics import median
from typing import Any

import qfx._C as _C
import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import qfx
from benchmarks.common import ROOT, machine, save

HIDDEN, HEADS, LAYERS, BATCH, LENGTH, WORDS = 768, 12, 8, 8, 128, 8192


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

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.norm(self.layers(self.words(tokens))))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def compilers() -> dict[str, Any]:
    return {
        "float32 Inductor": lambda model: torch.compile(model),
        "qfx": lambda model: torch.compile(model, backend=qfx.backend),
        "qfx, int8 backward": lambda model: torch.compile(
            model, backend=qfx.backend, options={"backward": "int8"}
        ),
    }


class Step:
    """One optimizer step of a compiled model on fixed tokens."""

    def __init__(self, compiler: str) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.run = compilers()[compiler](self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(0, WORDS, (BATCH, LENGTH))

    def __call__(self) -> float:
        self.optimizer.zero_grad()
        loss = self.run(self.tokens)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def times(rounds: int) -> dict[str, dict[str, float]]:
    """Returns the median seconds of a step, measured in turn, and the loss after the same number of
    steps."""
    steps = {}
    for name in compilers():
        steps[name] = Step(name)
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


def memory(compiler: str) -> dict[str, float]:
    """Returns the maximum in megabytes held by the tensors of a step, above what lives between
    steps."""
    step = Step(compiler)
    for _ in range(2):
        step()
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    held = most = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return {"step_mb": most / 2**20}


def in_a_process(compiler: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.training", "--memory", compiler]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory", choices=compilers(), help="measure this one's memory only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory:
        print(json.dumps(memory(arguments.memory)))
        return
    found = times(arguments.rounds)
    rows = [{"model": n, "isa": _C.isa(), **found[n], **in_a_process(n)} for n in found]
    base = rows[0]
    for row in rows:
        row["speed"] = round(base["step_s"] / row["step_s"], 3)
    print(machine())
    print(tabulate(rows, headers="keys", floatfmt=".3f"))
    if arguments.save:
        print(save(f"training-{_C.isa()}", rows))


if __name__ == "__main__":
    main()
