"""The cross entropy of a head's logits, a chunk of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qfx.host.autograd import saving_values
from qfx.nn.functional import first_order

CHUNK = 2**22  # logits at a time, 16 MB of float32
_FEWEST = 32  # rows of a chunk, so that products stay products of matrices
_WHY = "its gradients are computed in the forward pass, so that no logits are kept"


def chunked_cross_entropy(
    head: Callable[[Tensor], Tensor],
    x: Tensor,
    target: Tensor,
    classes: int,
    dtype: torch.dtype,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    mean: bool = False,
    parameters: Sequence[Tensor] = (),
) -> Tensor:
    """Returns F.cross_entropy(head(x).to(dtype), target), a sum over rows or their mean, with the
    gradients of x [M, K] and of the parameters of the head. target: int64 [M].

    Each chunk's gradients are computed right after its loss, so that there are never more logits
    than those of one chunk. They are summed in float32. The gradients can be differentiated no
    further. `classes`: columns of the logits.
    """
    how = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": "sum"}
    rows = max(_FEWEST, CHUNK // classes)
    trained = [p for p in parameters if p.requires_grad]
    return _ChunkedLoss.apply(head, dtype, how, mean, rows, target, x, *trained)  # type: ignore[no-any-return]


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
        how: dict[str, Any],
        mean: bool,
        rows: int,
        target: Tensor,
        x: Tensor,
        *trained: Tensor,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        made = total.to(dtype)
        of = [each for each in (x, *trained) if each.requires_grad]
        sums: list[Tensor | None] = [None for _ in of]
        for start in range(0, len(x), rows):
            part = x[start : start + rows].detach().requires_grad_(x.requires_grad)
            with torch.enable_grad(), saving_values():
                logits = head(part).to(dtype)
                made = F.cross_entropy(logits, target[start : start + rows], **how)
            total += made.detach()
            found = _gradients(made, [part if each is x else each for each in of])
            for i, (each, grad) in enumerate(zip(of, found, strict=True)):
                if grad is not None:
                    sum_ = sums[i] = _started(sums[i], each)
                    (sum_[start : start + rows] if each is x else sum_).add_(grad)
        count = (target != how["ignore_index"]).sum() if mean else torch.ones_like(target[0])
        ctx.save_for_backward(x, count, *trained, *sums)
        return (total / count).to(made.dtype)  # autocast computes the loss in float32

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, count, *both = ctx.saved_tensors
        needs = ctx.needs_input_grad[6:]
        trained, sums = both[: len(needs) - 1], iter(both[len(needs) - 1 :])
        grad = first_order(grad, "A chunked loss", x, *trained, why=_WHY)
        grad = grad.float() / count.clamp(min=1)  # no gradient where no row counts

        def scaled(each: Tensor) -> Tensor | None:
            sum_ = next(sums)
            return None if sum_ is None else (sum_ * grad).to(each.dtype)

        pairs = zip((x, *trained), needs, strict=True)
        return (*(None,) * 6, *[scaled(each) if need else None for each, need in pairs])


def _started(sum_: Tensor | None, like: Tensor) -> Tensor:
    if sum_ is not None:
        return sum_
    return torch.zeros(like.shape, dtype=torch.float32, device=like.device)


def _gradients(loss: Tensor, of: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Returns the gradients; None for a parameter that the head does not use."""
    if not loss.requires_grad:  # the head uses none of its parameters that train
        return tuple(None for _ in of)
    with torch.autocast(loss.device.type, enabled=False):  # as in any backward pass
        return torch.autograd.grad(loss, of, allow_unused=True)
