"""lora_update: the product of a low-rank adapter, added to the output of its linear. Equation
(T4)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from qfx.nn.functional import first_order


def lora_update(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: float, overwrite: bool = False
) -> Tensor:
    """Returns y [..., N] + scaling (x [..., K] a [r, K]^T) b [N, r]^T, in the dtype of y.
    Differentiable once.

    All products are in the dtype of y, in which x is kept for the gradient of a. `overwrite`: write
    the sum over y, which must be contiguous and belong to nobody else. Equation (T4).
    """
    given = (y, x, a, b)
    if has_torch_function(given):  # a mode, such as that of save_in_int8
        return handle_torch_function(lora_update, given, *given, scaling, overwrite)  # type: ignore[no-any-return]
    return _LoraUpdateFunction.apply(y, x.to(y.dtype), a, b, scaling, overwrite)  # type: ignore[no-any-return]


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


class _LoraUpdateFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: float, overwrite: bool
    ) -> Tensor:
        h = _rows(x) @ a.to(y.dtype).t()
        ctx.save_for_backward(x, h, a, b)
        ctx.scaling = scaling
        b = b.to(y.dtype).t()
        if not overwrite:
            return torch.addmm(_rows(y), h, b, alpha=scaling).view_as(y)
        made = y.detach()  # no view of y for autograd, so that it may be changed in place
        _rows(made).addmm_(h, b, alpha=scaling)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, h, a, b = ctx.saved_tensors
        grad = first_order(grad, "A LoRA adapter", x, a, b)
        _, of_x, of_a, of_b, *_ = ctx.needs_input_grad
        g, dx, da, db = _rows(grad), None, None, None
        if of_x or of_a:
            dh = (g @ b.to(g.dtype)) * ctx.scaling
            dx = (dh @ a.to(g.dtype)).view_as(x) if of_x else None
            da = (dh.t() @ _rows(x)).to(a.dtype) if of_a else None
        if of_b:
            db = ((g.t() @ h) * ctx.scaling).to(b.dtype)
        return grad, dx, da, db, None, None
