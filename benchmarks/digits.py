"""A vision transformer for the 8x8 digits of scikit-learn, which trains in a minute.

float, int8 forward, and int8 forward and backward were trained to the end, and a 4-bit one was
fine-tuned with learned steps: docs/results.md has the outcome, tests/project/test_digits.py
repeats the first two briefly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn

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
