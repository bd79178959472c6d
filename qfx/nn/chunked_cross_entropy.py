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
    parameters: Sequence[Tensor] = (),
) -> Tensor:
    """Returns the sum over rows of F.cross_entropy(head(x).to(dtype), target), with the gradients
    of x [M, K] and of the parameters of the head. target: int64 [M].

    Each chunk's gradients are computed right after its loss, so that there are never more logits
    than those of one chunk. The gradients can be differentiated no further. `classes`: columns of
    the logits.
    """
    how = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": "sum"}
    rows = max(_FEWEST, CHUNK // classes)
    trained = [p for p in parameters if p.requires_grad]
    return _ChunkedLoss.apply(head, dtype, how, rows, target, x, *trained)  # type: ignore[no-any-return]


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
        how: dict[str, Any],
        rows: int,
        target: Tensor,
        x: Tensor,
        *trained: Tensor,
    ) -> Tensor:
        total = torch.zeros((), dtype=dtype, device=x.device)
        of_x = torch.empty_like(x) if x.requires_grad else None
        of_trained = [torch.zeros_like(p, dtype=torch.float32) for p in trained]
        for start in range(0, len(x), rows):
            part = x[start : start + rows].detach().requires_grad_(of_x is not None)
            with torch.enable_grad(), saving_values():
                logits = head(part).to(dtype)
                loss = F.cross_entropy(logits, target[start : start + rows], **how)
            found = _gradients(loss, [*([] if of_x is None else [part]), *trained])
            if of_x is not None:
                of_x[start : start + rows] = found.pop(0)
            for sum_, each in zip(of_trained, found, strict=True):
                sum_ += each
            total += loss.detach()
        ctx.save_for_backward(x, of_x, *trained, *of_trained)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, of_x, *both = ctx.saved_tensors
        trained, of_trained = both[: len(both) // 2], both[len(both) // 2 :]
        grad = first_order(grad, "A chunked loss", x, *trained, why=_WHY)
        found = [(g * grad).to(p.dtype) for g, p in zip(of_trained, trained, strict=True)]
        return (*(None,) * 5, None if of_x is None else of_x * grad, *found)


def _gradients(loss: Tensor, of: list[Tensor]) -> list[Tensor]:
    with torch.autocast(loss.device.type, enabled=False):  # as in any backward pass
        return [*torch.autograd.grad(loss, of)]
