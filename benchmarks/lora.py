"""LoRA by PEFT on a float32 base and on int8 bases: time and memory of a step.

SmolLM2-135M, 4 x 128 tokens of news, rank 8 on all linears but the head, AdamW. Each base has a
fresh process, in turn; imports and first compilations are done on a tiny model before. Times are
processor seconds, on one thread. Linux only: memory is read from /proc.
    python -m benchmarks.lora [--bases qfx,...] [--steps 20] [--rounds 3] [--save]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks.common import machine, merge
from benchmarks.fresh import FailedError, in_a_process
from benchmarks.resident import forget_peak, peak, resident
from benchmarks.typed import FLOAT, LIBRARIES, Library, Model

BATCH, LENGTH, STEPS, RATE = 4, 128, 20, 1e-3
BASES = (FLOAT, "qfx", "bitsandbytes int8")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 128, "num_hidden_layers": 2}
TINY: dict[str, Any] = {**SIZES, "num_attention_heads": 2}
Row = dict[str, Any]


@dataclass(frozen=True)
class Trained:
    """Losses and seconds of each step, and the first gradients of the adapters' second factors,
    zeros for those without (the gradients of the first factors are zero then)."""

    losses: list[float]
    seconds: list[float]
    gradients: list[Tensor]


def train(model: Model, ids: Tensor, steps: int) -> Trained:
    """Runs steps of AdamW on the adapters of `model`, always on the same tokens [B, L]."""
    second = [p for n, p in model.named_parameters() if "lora_B" in n]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    losses, seconds, gradients = [], [], []
    for step in range(steps):
        start = time.process_time()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if step == 0:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in second]
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - start)
        losses.append(loss.item())
    return Trained(losses, seconds, gradients)


def tiny(folder: Path) -> Path:
    """Saves a model of a few thousand weights in `folder`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(folder)
    return folder


def rehearse(library: Library) -> None:
    """Does everything that a library imports, compiles and allocates once, on a tiny model."""
    with tempfile.TemporaryDirectory() as folder:
        model = library.adapt(library.quantize(tiny(Path(folder))))
        train(model, torch.arange(64)[None], 2)


def own_pages(model: Model) -> None:
    """Copies float weights that are pages of a mapped file: one of them would keep the whole file
    resident."""
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter and parameter.is_floating_point():
            parameter.data = parameter.data.clone()


def measure(library: Library, folder: Path, ids: Tensor, steps: int) -> tuple[Model, Trained, Row]:
    """Measures in this process: the first step is not timed, but its memory counts."""
    rehearse(library)
    before = resident()
    torch.manual_seed(0)
    model = library.adapt(library.quantize(folder))
    own_pages(model)
    loaded = resident()
    forget_peak()
    trained = train(model, ids, steps)
    return (
        model,
        trained,
        {
            "step_s": median(trained.seconds[1:]),
            "best_s": min(trained.seconds[1:]),
            "base_mb": (loaded - before) / 1e6,
            "step_mb": (peak() - loaded) / 1e6,
            "loss_first": trained.losses[0],
            "loss_last": trained.losses[-1],
        },
    )


def tokens() -> tuple[Path, Tensor]:
    """Returns the folder of SmolLM2, and BATCH x LENGTH tokens of news."""
    from transformers import AutoTokenizer

    from benchmarks.smollm import converted, passages

    folder = converted()
    rows = passages(AutoTokenizer.from_pretrained(folder), 0, BATCH, LENGTH)
    return folder, torch.cat([row for row, _ in rows])


def row_of(base: str, rounds: list[Row]) -> Row:
    """Returns a row of medians over the rounds."""
    middle = {key: median(r[key] for r in rounds) for key in rounds[0]}
    digits = {"base_mb": 0, "step_mb": 0}
    figures = {key: round(value, digits.get(key, 3)) for key, value in middle.items()}
    return {"base": base, "threads": 1, "rounds": len(rounds), **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--bases", default=",".join(BASES))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    parser.add_argument("--one", choices=LIBRARIES, help="only this one, in this process")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        print(json.dumps(measure(LIBRARIES[options.one], *tokens(), options.steps)[2]))
        return
    samples: dict[str, list[Row]] = {name: [] for name in options.bases.split(",")}
    failed: list[Row] = []
    for _ in range(options.rounds):
        for name in samples:
            arguments = ("--one", name, "--steps", str(options.steps))
            try:
                samples[name].append(in_a_process("benchmarks.lora", *arguments))
            except FailedError as why:
                failed.append({"base": name, "threads": 1, "reason": str(why)})
    host = machine()
    found = [row_of(name, rounds) for name, rounds in samples.items() if rounds]
    print(host)
    print(tabulate(found, headers="keys"))
    print(*(f"no {row['base']}: {row['reason']}" for row in failed), sep="\n")
    if options.save:
        rows = [{**row, "commit": host["commit"]} for row in found + failed]
        print(f"wrote {merge('lora', rows, ('base', 'threads'))}")


if __name__ == "__main__":
    main()
