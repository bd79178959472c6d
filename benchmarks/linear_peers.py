"""Linears of PyTorch and of other libraries, for `python -m benchmarks linear --peers`.

"given": activations are bfloat16 or int8 codes before the time starts. Otherwise they are float32,
and the time includes their conversion. Outputs are float32, or bfloat16 if that is given.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.peer import missing, reason


class Layer(NamedTuple):
    """A linear with its inputs. `pack()` returns a weight of `nbytes`, `run` the product with it,
    and `finish` makes the linear's output of that, untimed."""

    pack: Callable[[], Any]
    run: Callable[[Any], Tensor]
    nbytes: int
    finish: Callable[[Tensor], Tensor] = Tensor.float


def codes_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the int8 codes of each row of `values` [R, K], symmetric, and the scales [R, 1]."""
    scales = values.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return torch.round(values / scales).to(torch.int8), scales


def bfloat16(given: bool, x_mk: Tensor, w_nk: Tensor, bias_n: Tensor) -> Layer:
    """oneDNN's linear with a packed weight, which Inductor calls with frozen weights."""
    rounded, bias, linear = x_mk.bfloat16(), bias_n.bfloat16(), torch.ops.mkldnn._linear_pointwise

    def run(weight: Tensor) -> Tensor:
        if given:
            return linear(rounded, weight, bias, "none", [], "")
        return linear(x_mk.bfloat16(), weight, bias, "none", [], "").float()

    packed = partial(torch.ops.mkldnn._reorder_linear_weight, w_nk.bfloat16(), len(x_mk))
    return Layer(packed, run, 2 * w_nk.numel())


def int_mm(x_mk: Tensor, w_nk: Tensor, bias_n: Tensor) -> Layer:
    """int32 sums only: scales and bias are applied outside of the time."""
    (x, x_scale), (w, w_scale) = codes_of(x_mk), codes_of(w_nk)
    return Layer(
        lambda: w.clone().t(),
        partial(torch._int_mm, x),
        w.numel(),
        lambda sums: sums * x_scale * w_scale.t() + bias_n,
    )


def onednn(x_mk: Tensor, w_nk: Tensor, bias_n: Tensor) -> Layer:
    """uint8 activations with one scale, as PyTorch's quantizer for x86 has them."""
    (w, w_scale), zeros = codes_of(w_nk), torch.zeros(len(w_nk), dtype=torch.int64)
    scale = float(x_mk.abs().max()) / 127
    x = (torch.round(x_mk / scale) + 128).to(torch.uint8)
    how: tuple[Any, ...] = (w_scale.flatten(), zeros, bias_n, 1.0, 0, torch.float32, "none", [], "")
    return Layer(
        partial(torch.ops.onednn.qlinear_prepack, w, x.shape),
        lambda weight: torch.ops.onednn.qlinear_pointwise(x, scale, 128, weight, *how),
        w.numel(),
    )


def zentorch(dtype: torch.dtype, x_mk: Tensor, w_nk: Tensor, bias_n: Tensor) -> Layer:
    """zentorch's linear on a weight that is not prepacked: prepacked ones are wrong if K > N."""
    import zentorch  # noqa: F401 (which registers the operator)

    (w, w_scale), x = codes_of(w_nk), x_mk.to(dtype)
    linear, scales = torch.ops.zentorch.zentorch_dynamic_qlinear, w_scale.flatten()
    return Layer(w.clone, lambda weight: linear(x, weight, scales, bias_n), w.numel())


Prepare = Callable[[Tensor, Tensor, Tensor], Layer]
ZENTORCH = ("zentorch", "deprecated", "wrapt")
PEERS: dict[str, tuple[Prepare, tuple[str, ...]]] = {
    "bfloat16 oneDNN": (partial(bfloat16, False), ()),
    "bfloat16 oneDNN, given": (partial(bfloat16, True), ()),
    "int8 oneDNN qlinear, given": (onednn, ()),
    "int8 torch._int_mm, given": (int_mm, ()),
    "int8 zentorch": (partial(zentorch, torch.float32), ZENTORCH),
    "int8 zentorch, bfloat16 given": (partial(zentorch, torch.bfloat16), ZENTORCH),
}


def prepared(name: str, *operands: Tensor) -> Layer | str:
    """Returns a peer that has run once, or the reason why it does not run."""
    prepare, packages = PEERS[name]
    if lacking := missing(packages):
        return lacking
    try:
        layer = prepare(*operands)
        layer.run(layer.pack())
        return layer
    except Exception as why:
        return reason(why)
