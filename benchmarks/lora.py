"""LoRA by PEFT: the losses, time and memory of steps, and a tiny model for rehearsals."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.resident import forget_peak, peak, resident
from benchmarks.typed import Library, Model

RATE = 1e-3
SIZES = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 128, "num_hidden_layers": 2}
TINY: dict[str, Any] = {**SIZES, "num_attention_heads": 2}


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


def measure(
    library: Library, folder: Path, ids: Tensor, steps: int
) -> tuple[Model, Trained, dict[str, float]]:
    """Measures in this process: the first step is not timed, but its memory counts."""
    rehearse(library)
    before = resident()
    torch.manual_seed(0)
    model = library.adapt(library.quantize(folder))
    own_pages(model)
    loaded = resident()
    forget_peak()
    trained = train(model, ids, steps)
    figures = {
        "step_s": median(trained.seconds[1:]),
        "base_mb": (loaded - before) / 1e6,
        "step_mb": (peak() - loaded) / 1e6,
        "loss_first": trained.losses[0],
        "loss_last": trained.losses[-1],
    }
    return model, trained, figures
