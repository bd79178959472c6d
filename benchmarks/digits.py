"""Trains a small vision transformer on 8x8 digits (float, int8 forward, int8 forward and backward)
and fine-tunes a 4-bit one. `python -m benchmarks.digits [--save] [--seeds 3] [--epochs 30]`

Accuracy and mean negative log likelihood (nll) on 597 held-out images, means over the seeds.
"""

from __future__ import annotations

import argparse
import copy
import time
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from tabulate import tabulate
from torch import Tensor, nn

import qfx
from benchmarks.common import save

WIDTH, HEADS, BLOCKS, PATCH, BATCH = 64, 4, 4, 2, 48
TOKENS = (8 // PATCH) ** 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        heads = F.scaled_dot_product_attention(*(t.transpose(-2, -3) for t in (q, k, v)))
        x = x + self.out(heads.transpose(-2, -3).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class DigitsViT(nn.Module):
    """A vision transformer: [B, 16 tokens, 4 pixels] -> logits [B, 10], with 202 thousand
    parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH * PATCH, WIDTH)
        self.position = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(x) + self.position)).mean(-2))


@dataclass(frozen=True)
class Data:
    """Patches [count, tokens, pixels] and labels."""

    x: Tensor
    y: Tensor

    @staticmethod
    def load() -> tuple[Data, Data]:
        """Returns 1200 images for training and 597 for evaluation."""
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32) / 16 - 0.5
        patches = images.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).flatten(3).flatten(1, 2)
        order = torch.randperm(len(patches), generator=torch.Generator().manual_seed(0))
        x, y = patches[order], torch.tensor(digits.target)[order]
        return Data(x[:1200], y[:1200]), Data(x[1200:], y[1200:])


@dataclass(frozen=True)
class Score:
    accuracy: float  # percent
    nll: float


def score_of(logits: Tensor, y: Tensor) -> Score:
    accuracy = (logits.argmax(-1) == y).float().mean()
    return Score(100 * float(accuracy), float(F.cross_entropy(logits, y)))


@torch.no_grad()
def score(model: Any, data: Data) -> Score:
    return score_of(model(data.x), data.y)


def train(run: Any, model: nn.Module, data: Data, epochs: int, rate: float, seed: int) -> None:
    """Trains by AdamW with a one-cycle rate. `run` is the model or its compiled form."""
    generator = torch.Generator().manual_seed(seed)
    steps = epochs * (len(data.x) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    for _ in range(epochs):
        order = torch.randperm(len(data.x), generator=generator)
        for batch in order[: steps // epochs * BATCH].split(BATCH):
            optimizer.zero_grad()
            loss = F.cross_entropy(run(data.x[batch]), data.y[batch], label_smoothing=0.05)
            loss.backward()
            optimizer.step()
            schedule.step()


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend=qfx.backend, options={"minimum_gain": 0, **options})


VARIANTS: dict[str, Any] = {
    "float": lambda model: torch.compile(model),
    "int8 forward": lambda model: compiled(model),
    "int8 forward and backward": lambda model: compiled(model, backward="int8"),
}
FOUR_BIT = qfx.Scheme(
    x=qfx.QSpec(bits=4, axes=qfx.PER_TENSOR), w=qfx.QSpec(bits=4, axes=qfx.PER_TENSOR)
)


def from_scratch(variant: str, seed: int, epochs: int) -> tuple[nn.Module, Score]:
    torch.manual_seed(seed)
    training, held_out = Data.load()
    model = DigitsViT()
    run = VARIANTS[variant](model)
    train(run, model, training, epochs, 4e-3, seed)
    return model, score(run, held_out)


def fine_tuned(trained: nn.Module, seed: int, epochs: int) -> tuple[Score, Score]:
    """Returns the scores of a float model made 4-bit per tensor, before and after training with
    learned steps."""
    training, held_out = Data.load()
    model = qfx.prepare_qat(
        copy.deepcopy(trained), training.x[:256], config=qfx.Config(scheme=FOUR_BIT)
    )
    run = torch.compile(model)
    before = score(run, held_out)
    train(run, model, training, epochs, 1e-4, seed)
    return before, score(run, held_out)


def survey(seeds: int, epochs: int) -> dict[str, list[Score]]:
    """Returns the scores of every variant, a list over the seeds."""
    found: dict[str, list[Score]] = {}
    for seed in range(seeds):
        for variant in VARIANTS:
            start = time.perf_counter()
            model, result = from_scratch(variant, seed, epochs)
            found.setdefault(variant, []).append(result)
            print(
                f"seed {seed}, {variant}: {result}, {time.perf_counter() - start:.0f} s", flush=True
            )
            if variant == "float":
                before, after = fine_tuned(model, seed, max(epochs // 3, 1))
                found.setdefault("4 bits", []).append(before)
                found.setdefault("4 bits, fine-tuned", []).append(after)
            torch._dynamo.reset()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = survey(arguments.seeds, arguments.epochs)
    rows = [
        {
            "model": name,
            "accuracy %": round(mean(s.accuracy for s in scores), 2),
            "nll": round(mean(s.nll for s in scores), 4),
        }
        for name, scores in found.items()
    ]
    print(tabulate(rows, headers="keys"))
    if arguments.save:
        save("digits", rows)


if __name__ == "__main__":
    main()
