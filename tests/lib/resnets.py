"""A small residual network, and the digits that it learns."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn


class Residual(nn.Module):
    """Two convolutions with batch norms beside a connection that skips them."""

    def __init__(self, channels: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.skip: nn.Module = nn.Identity()
        if stride > 1:
            skip = nn.Conv2d(channels, outputs, 1, stride, bias=False)
            self.skip = nn.Sequential(skip, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        inside = F.relu(self.norm1(self.first(x)))
        return F.relu(self.norm2(self.second(inside)) + self.skip(x))


def resnet() -> nn.Sequential:
    """Returns a network of six convolutions for images [B, 1, 8, 8] of ten classes."""
    torch.manual_seed(0)
    stem = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    return nn.Sequential(*stem, Residual(16, 16, 1), Residual(16, 32, 2), *head)


def digits() -> tuple[Tensor, Tensor]:
    """Returns the digits of scikit-learn as images [1797, 1, 8, 8] from 0 to 1, and their
    labels."""
    images, labels = load_digits(return_X_y=True)
    wide = torch.as_tensor(images, dtype=torch.float32, device="cpu")
    return wide.reshape(-1, 1, 8, 8) / 16, torch.as_tensor(labels, device="cpu")


def losses_of(model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> list[float]:
    """Trains the model on batches of 64 images, and returns the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    g, losses = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        at = torch.randint(0, 1400, (64,), generator=g)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[at]), labels[at])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
