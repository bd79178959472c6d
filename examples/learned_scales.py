"""A small network on 8x8 digits made 2-bit, then trained with learned scales and shifts.

`python examples/learned_scales.py` prints the accuracy on 597 held-out images, in percent.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import qfx

TWO_BITS = qfx.Scheme(
    x=qfx.QSpec(bits=2, axes=qfx.PER_TENSOR), w=qfx.QSpec(bits=2, axes=qfx.PER_TENSOR)
)


def train(model, x, y, rate, epochs):
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=generator).split(48):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model, x, y):
    return 100 * (model.eval()(x).argmax(-1) == y).float().mean().item()


def main() -> float:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits()
    order = torch.randperm(len(digits.target))
    x = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    y = torch.tensor(digits.target)[order]
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    model.append(nn.Linear(64, 10))
    train(model, x[:1200], y[:1200], 3e-3, 15)
    print(f"float {accuracy(model, x[1200:], y[1200:]):.2f}")
    qfx.prepare_qat(model, x[:256], config=qfx.Config(scheme=TWO_BITS), shift=True)
    print(f"2 bits {accuracy(model, x[1200:], y[1200:]):.2f}")
    train(model.train(), x[:1200], y[:1200], 2e-3, 30)
    return accuracy(model, x[1200:], y[1200:])


if __name__ == "__main__":
    print(f"{main():.2f}")
