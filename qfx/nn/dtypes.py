"""Dtypes of new modules and of outputs under autocast, and casts that leave some tensors in
float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

Cast = Callable[[Tensor], Tensor]


def drawn_linear(
    in_features: int, out_features: int, bias: bool, device: Any = None, dtype: Any = None
) -> nn.Linear:
    """Returns a linear initialised like nn.Linear. The values are drawn in float32 whatever the
    default dtype is and cast to `dtype`, by default float32. The linear is on `device` or on the
    default device, so `with torch.device("meta")` creates modules without values."""
    drawn = nn.Linear(in_features, out_features, bias, device=device, dtype=torch.float32)
    return drawn if dtype is None else drawn.to(dtype)


@torch.fx.wrap  # symbolic tracing does not know the type of x
def output_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype that nn.Linear would return for this input: that of autocast if it is on,
    otherwise that of x. Autocast does not change float64. x is quantized in its own dtype; only the
    result is cast."""
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.amp.is_autocast_available(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def casting_all_but(kept: Iterable[Tensor | None], cast: Cast) -> Cast:
    """Returns the function `cast` for `nn.Module._apply`, changed so that the tensors in `kept` and
    their gradients keep their dtype: `.half()` should change the dtype of the computation, not of
    scales and steps."""
    tensors = [t for t in kept if t is not None]
    ids = {id(t) for each in tensors for t in (each, each.grad) if t is not None}

    def cast_or_moved(t: Tensor) -> Tensor:
        made = cast(t)
        return t.to(made.device) if id(t) in ids and made.dtype != t.dtype else made

    return cast_or_moved
