"""Sharding: how PyTorch's distributed tensors (DTensor) pass through the operators of qfx.
Activations are cut along rows, operands of attention along batches and heads. Weights are whole on
each rank.

PyTorch accepts such rules only when its distributed tensors are imported, which takes as long as
the rest of `import qfx`. Therefore `register` is called when qfx first meets them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from qfx.host.distributed import register_sharding_rule

ops = torch.ops.qfx
# For each operator: the arguments that have rows, and how many results have them too.
_BY_ROWS: dict[Any, tuple[tuple[str, ...], int]] = {
    ops.quantize.default: (("x", "scale", "zero_point"), 3),
    ops.dequantize.default: (("q", "scale", "zero_point"), 1),
    ops.fake_quantize.default: (("x",), 1),
    ops.rotate.default: (("x",), 1),
    ops.int8_mm.default: (("q", "zero_point"), 1),
    ops.linear.default: (("q", "scale", "zero_point"), 1),
    ops.linear_dynamic.default: (("x",), 1),
    ops.linear_float.default: (("x",), 1),
}
_BY_HEADS = {
    ops.int8_attention.default: (("q", "k", "v", "mask"), 1),
    ops.int8_attention_backward.default: (("grad", "q", "k", "v", "mask"), 3),
    ops.attention_decode.default: (("q", "k", "v", "mask"), 1),
}
_HEAD_DIMS = 2  # the last two, tokens and features, are not cut


@cache
def register() -> None:
    """Registers the sharding rules of our operators with PyTorch. Further calls do nothing."""
    for operator, (names, results) in _BY_ROWS.items():
        register_sharding_rule(operator, _rule(operator, names, results, 1))
    for operator, (names, results) in _BY_HEADS.items():
        register_sharding_rule(operator, _rule(operator, names, results, _HEAD_DIMS))


def _rule(
    operator: Any, names: Sequence[str], results: int, whole_dims: int
) -> Callable[..., list[tuple[list[Any], list[Any]]]]:
    """Returns the sharding rule of an operator: a function of its arguments that returns all
    placements that PyTorch may choose. In the first placement everything is whole. In each other
    placement one dimension is cut, in all arguments of `names` that have it. The last `whole_dims`
    dimensions are never cut."""
    from torch.distributed.tensor import Replicate, Shard

    schema = [argument.name for argument in operator._schema.arguments]

    def ways(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        arguments = dict(zip(schema, args, strict=False))
        dims = 0 if _all_rows_together(arguments) else arguments[names[0]].ndim - whole_dims
        tensors = {name: value for name, value in arguments.items() if hasattr(value, "placements")}
        found: list[tuple[list[Any], list[Any]]] = []
        for dim in (None, *range(dims)):
            cut = {n for n in names if dim is not None and _has(tensors.get(n), dim)}
            if dim is None or (names[0] in cut and _alike([tensors[n] for n in cut], dim)):
                place: Any = Replicate() if dim is None else Shard(dim)
                inputs = [place if name in cut else Replicate() for name in arguments]
                given_to = [
                    p if n in tensors else None for n, p in zip(arguments, inputs, strict=True)
                ]
                found.append(([place] * results, given_to))
        return found

    return ways


def _all_rows_together(arguments: dict[str, Any]) -> bool:
    """Whether all rows share one scale that is computed from them."""
    code, axes = arguments.get("code"), arguments.get("axes")
    return bool(code and code[2]) or (axes is not None and len(axes) > 1)


def _has(tensor: Any, dim: int) -> bool:
    return tensor is not None and dim < tensor.ndim and tensor.shape[dim] != 1


def _alike(tensors: Sequence[Any], dim: int) -> bool:
    """Whether the parts that a rank gets belong together if all tensors are cut along `dim`: their
    sizes are equal or, as for heads that share keys, multiples of the number of ranks."""
    sizes = {tensor.shape[dim] for tensor in tensors}
    return len(sizes) == 1 or not any(size % tensors[0].mesh.size() for size in sizes)
