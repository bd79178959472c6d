"""The losses whose gradients predictions take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qfx.calibration import losses
from qfx.calibration.losses import LOSSES, losses_of
from tests.lib.bounds import U32
from tests.lib.live_bytes import most_bytes


class Named(dict[str, Tensor]):
    @property
    def logits(self) -> Tensor:
        return self["logits"]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_labels_are_drawn_from_the_logits() -> None:
    """The gradient is p - y, so y is as often each label as p says: in 20000 rows within five of
    its standard deviations."""
    p = torch.tensor([0.5, 0.3, 0.2, 0.0])
    logits = p.log().repeat(20000, 1).requires_grad_()
    losses.labels(logits, generator()).sum().backward()
    assert logits.grad is not None
    drawn = (p - logits.grad).mean(0)
    assert ((drawn - p).abs() <= 5 * (p * (1 - p) / 20000).sqrt() + 1e-6).all()


def test_rows_of_logits_with_a_nan_do_not_count() -> None:
    logits = torch.randn(2, 3, 5)
    logits[1, 1, 4] = torch.nan
    assert losses.labels(logits, generator()).shape == (5,)
    with pytest.raises(ValueError, match="have no row without a NaN"):
        losses.labels(logits[1, 1], generator())


def test_logits_of_a_large_vocabulary_are_copied_once() -> None:
    """For the gradient, which is that of PyTorch's cross entropy but for the last bits of exp."""
    logits = torch.randn(8, 5000, requires_grad=True)
    size, slack = 4 * logits.numel(), 100 * len(logits)
    assert most_bytes(lambda: losses.labels(logits, generator()).sum().backward()) <= size + slack
    found, logits.grad = logits.grad, None
    drawn = logits.detach().softmax(-1).multinomial(1, generator=generator()).squeeze(1)
    F.cross_entropy(logits, drawn, reduction="sum").backward()
    assert found is not None and logits.grad is not None
    assert ((found - logits.grad).abs() <= 8 * U32).all()  # of numbers between -1 and 1


@pytest.mark.parametrize("output", [Named(logits=torch.ones(2, 3)), {"logits": torch.ones(2, 3)}])
def test_what_is_called_logits_has_labels(output: Any) -> None:
    wanted = losses.labels(torch.ones(2, 3), generator())
    assert torch.equal(losses_of(output, None, generator()), wanted)


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: (t, 1), lambda t: {"hidden": t}])
def test_other_outputs_have_a_direction(wrap: Any) -> None:
    y = torch.randn(2, 3, 5)
    wanted = LOSSES["direction"](y, generator())
    assert wanted.shape == (6,)
    assert torch.equal(losses_of(wrap(y), None, generator()), wanted)


def test_directions_have_the_length_of_the_output() -> None:
    """So that 1/2 (g d)^2 is on average half of |d|^2 / |y|^2: the mean of 160000 squares of normal
    numbers, within five of its standard deviations."""
    y = (torch.randn(20000, 8) * torch.logspace(-3, 3, 20000)[:, None]).requires_grad_()
    losses.direction(y, generator()).sum().backward()
    assert y.grad is not None
    squares = (y.grad * y.detach().norm(dim=1, keepdim=True)).square()
    assert abs(squares.mean().item() - 1) < 5 * (2 / squares.numel()) ** 0.5
