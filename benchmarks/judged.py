"""Trained models with the data that judges them: what benchmarks/accuracy.py compares.

Each model takes tensors and returns one; its outputs in float are what int8 ones are judged by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch import Tensor, nn

from benchmarks import digits, smollm
from examples import minilm
from qfx.ops.single_tensors import sqnr

Figures = dict[str, float]
WORDS = {
    "simlex999.txt": "d5e0501971478a511430ee880bd0121e94ac701ba86d90544d83e6d2ba3db05d",
    "wordsim353.tsv": "f92a022fc2537793a15bc3a8c162ebcd74990e033a228bb6388cb71e4c0b1e1d",
}


@dataclass(frozen=True)
class Judged:
    """`score(outputs, expected)`: figures of the outputs for `inputs`, beside those in float."""

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
    """SmolLM2 on news texts and on questions for capitals."""
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
    """Perplexity, mean KL(float || int8) in nats and top-1 agreement over all predicted tokens."""
    nll = kl = same = 0.0
    for real, target, found, wanted in zip(task.real, task.targets, logits, expected, strict=True):
        log_q, log_p = F.log_softmax(found[real], -1), F.log_softmax(wanted[real], -1)
        nll += float(F.nll_loss(log_q, target[real], reduction="sum"))
        kl += float(F.kl_div(log_q, log_p, log_target=True, reduction="sum"))
        same += float((log_q.argmax(-1) == log_p.argmax(-1)).sum())
    count = int(task.real.sum())
    return {"perplexity": math.exp(nll / count), "KL": kl / count, "top-1 %": 100 * same / count}


class Embedding(nn.Module):
    """input_ids, token_type_ids, attention_mask [B, L] -> sentence embeddings [B, 384]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        return minilm.embed(self.model, dict(zip(INPUTS, inputs, strict=True)))


INPUTS = ("input_ids", "token_type_ids", "attention_mask")


def sentences() -> Judged:
    """MiniLM: 50 texts and two lists of word pairs, with the similarity people see in them. It is
    calibrated on the beginnings of 64 other texts."""
    data = minilm.load()
    folder = minilm.fetch(minilm.TEXTS, {f"{minilm.TEXTS_FOLDER}/{n}": s for n, s in WORDS.items()})
    lists = {name: _pairs((folder / minilm.TEXTS_FOLDER / name).read_text()) for name in WORDS}
    words = sorted({w for pairs in lists.values() for a, b, _ in pairs for w in (a, b)})
    encoded = data.tokenizer(words, padding=True, return_tensors="pt")
    inputs = [tuple(source[name] for name in INPUTS) for source in (data.inputs, encoded)]
    others = [
        data.tokenizer(texts, padding=True, truncation=True, max_length=64, return_tensors="pt")
        for texts in zip(*[iter(smollm.news_texts()[:64])] * 8, strict=True)
    ]
    batches = [tuple(other[name] for name in INPUTS) for other in others]
    score = partial(_sentences, data.human, words, lists)
    return Judged.of(Embedding(data.model).eval(), inputs, score, batches)


Pairs = list[tuple[str, str, float]]


def _pairs(text: str) -> Pairs:
    rows = [line.split("\t") for line in text.splitlines() if line and not line.startswith("#")]
    return [(a, b, float(score)) for a, b, score in rows]


def _sentences(
    human: Tensor,
    words: list[str],
    lists: dict[str, Pairs],
    outputs: Sequence[Tensor],
    expected: Sequence[Tensor],
) -> Figures:
    texts, vectors = outputs
    unit = dict(zip(words, F.normalize(vectors.double(), dim=1), strict=True))
    found = {"texts Pearson": minilm.pearson_to_human(texts, human)}
    for name, pairs in lists.items():
        cosines = [float(unit[a] @ unit[b]) for a, b, _ in pairs]
        rank = spearmanr(cosines, [score for *_, score in pairs]).statistic
        found[f"{name.partition('.')[0]} Spearman"] = float(rank)
    return {**found, "SQNR dB": sqnr(expected[0], texts)}


def images() -> Judged:
    """The vision transformer of benchmarks/digits.py, trained in float for 30 epochs, seed 0."""
    torch.manual_seed(0)
    training, held_out = digits.Data.load()
    model = digits.DigitsViT()
    digits.train(model, model, training, epochs=30, rate=4e-3, seed=0)
    return Judged.of(model.eval(), [(held_out.x,)], partial(_images, held_out))


def _images(data: digits.Data, outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> Figures:
    score = digits.score_of(outputs[0], data.y)
    return {
        "accuracy %": score.accuracy,
        "nll": score.nll,
        "SQNR dB": sqnr(expected[0], outputs[0]),
    }


JUDGED = {"smollm": language, "minilm": sentences, "digits": images}
