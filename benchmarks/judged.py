"""Trained models with evaluation data, as compared by benchmarks/accuracy.py.

This file has a language model and a vision model; encoders are in judged_encoders.py. Each model
takes tensors and returns one; its float outputs are the reference for those in int8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import digits, smollm
from qfx.ops.single_tensors import sqnr

Figures = dict[str, float]


@dataclass(frozen=True)
class Judged:
    """A model with its evaluation. `score(outputs, expected)`: figures of the outputs for `inputs`,
    compared with those in float."""

    model: nn.Module
    inputs: Sequence[tuple[Tensor, ...]]
    expected: Sequence[Tensor]
    score: Callable[[Sequence[Tensor], Sequence[Tensor]], Figures]
    batches: Sequence[tuple[Tensor, ...]] = ()  # other inputs, for calibration

    @classmethod
    @torch.no_grad()
    def of(cls, model: nn.Module, inputs: Any, score: Any, batches: Any = ()) -> Judged:
        return cls(model, inputs, [model(*i) for i in inputs], score, batches)

    def judge(self, outputs: Sequence[Tensor]) -> Figures:
        return self.score(outputs, self.expected)


def language(
    texts: int = 12, tokens: int = 128, sections: Sequence[str] = ("common-countries", "world")
) -> Judged:
    """Returns SmolLM2 with news texts and questions about capitals."""
    model, tokenizer = smollm.load()
    tasks = {
        "news": smollm.news(tokenizer, texts, tokens),
        **{s: smollm.capitals(tokenizer, s) for s in sections},
    }
    batches = smollm.passages(tokenizer, skip=texts, count=64, tokens=256)
    inputs = [t.inputs for t in tasks.values()]
    return Judged.of(model, inputs, partial(_language, tasks), batches)


def _language(
    tasks: dict[str, smollm.Task], outputs: Sequence[Tensor], expected: Sequence[Tensor]
) -> Figures:
    news, *asked = tasks
    found = divergence(tasks[news], outputs[0], expected[0])
    for section, logits in zip(asked, outputs[1:], strict=True):
        right = (logits.argmax(-1) == tasks[section].targets) | ~tasks[section].real
        found[f"capitals {section} %"] = 100 * float(right.all(-1).float().mean())
    return found


def divergence(task: smollm.Task, logits: Tensor, expected: Tensor) -> Figures:
    """Returns perplexity, mean KL(float || int8) in nats and top-1 agreement over all predicted
    tokens."""
    nll = kl = same = 0.0
    for real, target, found, wanted in zip(task.real, task.targets, logits, expected, strict=True):
        log_q, log_p = F.log_softmax(found[real], -1), F.log_softmax(wanted[real], -1)
        nll += float(F.nll_loss(log_q, target[real], reduction="sum"))
        kl += float(F.kl_div(log_q, log_p, log_target=True, reduction="sum"))
        same += float((log_q.argmax(-1) == log_p.argmax(-1)).sum())
    count = int(task.real.sum())
    return {"perplexity": math.exp(nll / count), "KL": kl / count, "top-1 %": 100 * same / count}


def images() -> Judged:
    """Returns the vision transformer of benchmarks/digits.py, trained in float for 30 epochs, seed
    0. It is calibrated on 512 of its training images."""
    torch.manual_seed(0)
    training, held_out = digits.Data.load()
    model = digits.DigitsViT()
    digits.train(model, model, training, epochs=30, rate=4e-3, seed=0)
    batches = [(x,) for x in training.x[:512].split(64)]
    return Judged.of(model.eval(), [(held_out.x,)], partial(_images, held_out), batches)


def _images(data: digits.Data, outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> Figures:
    score = digits.score_of(outputs[0], data.y)
    return {
        "accuracy %": score.accuracy,
        "nll": score.nll,
        "SQNR dB": sqnr(expected[0], outputs[0]),
    }
