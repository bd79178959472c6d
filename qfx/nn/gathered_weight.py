"""Gathers a quantized weight whose rows or columns are split across ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from qfx.host.subclasses import as_parameter
from qfx.nn.linear import Linear
from qfx.nn.quantized_weight import QuantizedWeight
from qfx.ops.storage import Values, packed_values


def gathered_weight(weight: DTensor) -> QuantizedWeight:
    """Returns the whole quantized weight [N, K] from the parts of all ranks. Every rank of the mesh
    must call this function."""
    local: Any = weight.to_local()
    (n, k), scheme = weight.shape, local.scheme
    groups = -(-k // scheme.group) if scheme.group else 1

    def whole(part: Tensor | None, *sizes: tuple[int, int | None]) -> Tensor | None:
        """Gathers a tensor. `sizes` has for each dimension its size in the whole tensor, and
        whether it is split like rows (0), columns (1) or not at all (None)."""
        if part is None:
            return None
        found = [_placement(p, [along for _, along in sizes]) for p in weight.placements]
        shape = torch.Size([size for size, _ in sizes])
        strides = part.new_empty(shape, device="meta").stride()
        made = DTensor.from_local(
            part,
            weight.device_mesh,
            found,
            run_check=False,
            shape=shape,
            stride=strides,
        )
        return made.full_tensor()  # type: ignore[no-any-return]

    codes, *scales = local.unpacked
    by_group = ((n, 0), (groups, 1 if scheme.group else None))
    sizes = [((n, 0),) if s is None or s.dim() == 1 else by_group for s in scales]
    values = Values(
        whole(codes, (n, 0), (k, 1)), *[whole(s, *at) for s, at in zip(scales, sizes, strict=True)]
    )
    frozen = local.frozen._replace(
        packed=packed_values(values, scheme.w, scheme.group),
        factor=whole(local.factor, (k, 1)),
        shift=whole(local.shift, (k, 1)),
    )
    made = QuantizedWeight.holding(frozen, scheme, (n, k), weight.dtype)
    by_columns = any(placement == Shard(1) for placement in weight.placements)
    if by_columns and not scheme.group and _written(weight):
        placed = tuple(weight.placements)
        floats = DTensor.from_local(
            local.dequantize(torch.float32), weight.device_mesh, placed, run_check=False
        )
        made.requantize(floats.full_tensor())  # the ranks have different scales
    return made


def _written(weight: DTensor) -> bool:
    """Whether the part of some rank was written, and so no longer has the scales of the whole
    weight."""
    local: Any = weight.to_local()
    mark = torch.tensor(
        [float(not local.memory.has_scales_of_whole)], dtype=torch.float32, device=local.device
    )
    parts = [Partial("max")] * weight.device_mesh.ndim
    return bool(DTensor.from_local(mark, weight.device_mesh, parts, run_check=False).full_tensor())


def _placement(of: Any, along: list[int | None]) -> Any:
    """Returns the placement of a tensor for a weight with placement `of`. `along` has for each
    dimension of the tensor the dimension of the weight that it corresponds to."""
    return Shard(along.index(of.dim)) if isinstance(of, Shard) and of.dim in along else Replicate()


@contextmanager
def gathered_linears(model: nn.Module) -> Iterator[None]:
    """Context manager that gives int8 linears whose weights are split across ranks their whole
    weights and biases inside the `with` block. Every rank must enter it."""
    saved: list[tuple[nn.Module, dict[str, Any]]] = []
    try:
        for module in model.modules():
            weight: Any = module._parameters.get("weight") if isinstance(module, Linear) else None
            if not isinstance(weight, DTensor) or type(weight.to_local()) is not QuantizedWeight:
                continue
            saved.append((module, dict(module._parameters)))
            module._parameters["weight"] = as_parameter(gathered_weight(weight))
            bias: Any = module._parameters["bias"]
            if isinstance(bias, DTensor):
                whole = nn.Parameter(bias.full_tensor().detach(), bias.requires_grad)
                module._parameters["bias"] = whole
        yield
    finally:
        for module, parameters in saved:
            module._parameters.update(parameters)
