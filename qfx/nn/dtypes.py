"""Dtypes: of a new module, of what a linear returns under autocast, and what stays float32 when a
module is cast."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

Cast = Callable[[Tensor], Tensor]


def drawn_linear(
    in_features: int, out_features: int, bias: bool, device: Any = None, dtype: Any = None
) -> nn.Linear:
    """Makes a linear initialised as nn.Linear is, drawn in float32 whatever the default dtype, and
    cast to `dtype`, float32 by default. It lies on `device`, or the default one, so that
    `with torch.device("meta")` makes modules without values."""
    drawn = nn.Linear(in_features, out_features, bias, device=device, dtype=torch.float32)
    return drawn if dtype is None else drawn.to(dtype)


@torch.fx.wrap  # symbolic tracing does not know the type of x
def output_dtype(x: Tensor) -> torch.dtype:
    """What nn.Linear would return for this input: autocast's type where that is on, else its own.

    Autocast leaves float64 alone. x is quantized as it is given: only the result is cast.
    """
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.amp.is_autocast_available(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def casting_all_but(kept: Iterable[Tensor | None], cast: Cast) -> Cast:
    """`cast`, as `nn.Module._apply` is given it, but tensors in `kept` and their gradients keep
    their dtype: `.half()` is about computing, not about scales and steps."""
    tensors = [t for t in kept if t is not None]
    ids = {id(t) for each in tensors for t in (each, each.grad) if t is not None}

    def cast_or_moved(t: Tensor) -> Tensor:
        made = cast(t)
        return t.to(made.device) if id(t) in ids and made.dtype != t.dtype else made

    return cast_or_moved
