"""Losses of a model's output whose gradients measure the effect of a change of the output,
equations (D2) and (D3).

Each loss function returns one loss per prediction, that is per row of the output. The random
numbers are seeded, so the losses are the same each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qfx.host.tensors import tree_leaves
from qfx.io.errors import UserError

Loss = str | Callable[[Any], Tensor]  # a name of `LOSSES`, or a function of what the model returns


def labels(output: Any, random: torch.Generator) -> Tensor:
    """Returns the cross entropy of logits [..., V] with labels drawn from the distribution that the
    logits define, equation (D2). Rows with a NaN are left out."""
    rows = _rows(_logits_of(output))
    drawn, usable = _drawn(rows.detach(), random)
    rows = rows if usable.all() else rows[usable]
    return _CrossEntropy.apply(rows, drawn)  # type: ignore[no-any-return, no-untyped-call]


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy that saves memory by computing the softmax again in the backward. PyTorch's own
    keeps two tensors of the size of the logits."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, drawn: Tensor) -> Tensor:
        ctx.save_for_backward(rows, drawn)
        return F.cross_entropy(rows, drawn, reduction="none")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        rows, drawn = ctx.saved_tensors
        chances = rows.log_softmax(-1).exp_()
        chances[torch.arange(len(drawn), dtype=torch.int64, device=drawn.device), drawn] -= 1
        return chances.mul_(grad[:, None]), None


def _drawn(logits: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns a label for each usable row, and a mask of the usable rows. Few copies exist at once
    because vocabularies are large."""
    chances = logits.softmax(-1)
    usable = chances.sum(-1).isfinite()  # all elements of a row are NaN, or none
    chances = chances if usable.all() else chances[usable]
    if not chances.numel():
        raise UserError("calibrate: the logits of a batch have no row without a NaN")
    return chances.multinomial(1, generator=random).squeeze(1), usable


def direction(output: Any, random: torch.Generator) -> Tensor:
    """Returns the scalar product of each output row with a random direction, divided by the norm of
    the row, equation (D3)."""
    rows = _rows(_first(output))
    lengths = rows.detach().norm(dim=-1).clamp_min(1e-30)
    towards = torch.randn(rows.shape, generator=random, dtype=torch.float32, device="cpu")
    return (rows * towards).sum(-1) / lengths


LOSSES: dict[str, Callable[[Any, torch.Generator], Tensor]] = {
    "labels": labels,
    "direction": direction,
}


def losses_of(output: Any, loss: Loss | None, random: torch.Generator) -> Tensor:
    """Returns one loss per prediction. The default is `labels` if the output has logits, else
    `direction`."""
    with torch.inference_mode(False), torch.enable_grad():
        if not (loss is None or isinstance(loss, str)):
            return _checked(loss(output))
        return LOSSES[loss or ("labels" if _named(output) is not None else "direction")](
            output, random
        )


def _checked(losses: Any) -> Tensor:
    if not isinstance(losses, Tensor) or not losses.is_floating_point():
        raise UserError(
            f"calibrate: the loss returned a {type(losses).__name__}, not a tensor of floats with "
            "the loss of each prediction"
        )
    return losses


def _rows(output: Tensor) -> Tensor:
    return output.reshape(-1, output.shape[-1] if output.dim() else 1).float()


def _named(output: Any) -> Tensor | None:
    """Returns the entry or attribute `logits` of the output, or None."""
    found = output.get("logits") if isinstance(output, Mapping) else None
    found = getattr(output, "logits", None) if found is None else found
    return found if isinstance(found, Tensor) else None


def _logits_of(output: Any) -> Tensor:
    found = _named(output)
    return _first(output) if found is None else found


def _first(output: Any) -> Tensor:
    """Returns the first tensor of floats in a model's output."""
    leaves = (t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point())
    found = next(leaves, None)
    if found is None:
        raise UserError("calibrate: the model returns no tensor of floats to take gradients from")
    return found
