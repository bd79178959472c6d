"""A linear whose weight is split by columns: the ranks add their sums before scaling them.

All ranks quantize a row of x with the same scale and add int32 sums exactly, so any number of ranks
gives the same bits as one process. For weights with groups the sums are floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from qfx.host.autograd import without_autocast
from qfx.host.tensors import has_values
from qfx.nn.dtypes import output_dtype
from qfx.nn.frozen import carried, run
from qfx.nn.functional import shifted
from qfx.nn.quantized_weight import QuantizedWeight
from qfx.ops.code import Code, code_of
from qfx.ops.lowering import Circumstance, lower
from qfx.ops.sharding import register

ops = torch.ops.qfx
Placements = Sequence[Any]
register()


@torch.compiler.allow_in_graph
def linear_of_parts(
    x: Any, weight: Any, bias: Any, reduce_dtype: torch.dtype | None = None
) -> Tensor:
    """Computes x [..., K] -> [..., N] with a weight that is split across ranks.

    Uses `row_parallel` if the weight is split by columns, otherwise PyTorch's rules for DTensor.
    This function is one node of a captured graph, because Dynamo could not inspect a local part
    inside of it.
    """
    y = row_parallel(x, weight, bias, reduce_dtype)
    if y is not None:
        return y
    dtype = output_dtype(x)  # autocast casts only the result: x is quantized in its own dtype
    return without_autocast(F.linear)(x, weight, bias).to(dtype)


def row_parallel(
    x: Any, weight: Any, bias: Any, reduce_dtype: torch.dtype | None = None
) -> DTensor | None:
    """Multiplies x [..., K] by a quantized weight [N, K], both split along K in the same dimensions
    of a mesh, and returns y [..., N], which every rank has. Returns None if x and weight are not
    split in this way.

    `reduce_dtype`: the dtype of the sums that the ranks send each other. The default is int32,
    which is exact, if the weight has one scale for each row and every rank has the scales of the
    whole weight. The default is float32 for a weight with groups, for a weight of which a rank has
    overwritten its part (the part then has scales of its own), and in graphs that are traced.
    """
    placed = _placements(x, weight, bias)
    if placed is None:
        return None
    local = weight.to_local()
    given = bias.to_local(grad_placements=_gradients(placed)) if _sharded(bias) else bias
    summed = _Summed(x.device_mesh, [placement is None for placement in placed])
    y = _product(x.to_local(), local, given, summed, reduce_dtype)
    shape = (*x.shape[:-1], weight.shape[0])
    strides = torch.empty(shape, dtype=torch.float32, device="meta").stride()
    found = [placement or Replicate() for placement in placed]
    return DTensor.from_local(
        y, x.device_mesh, found, run_check=False, shape=torch.Size(shape), stride=strides
    )


def _sharded(tensor: Any) -> bool:
    return isinstance(tensor, DTensor)


def _placements(x: Any, weight: Any, bias: Any) -> list[Any] | None:
    """Returns the placement of y in each dimension of the mesh, with None for the dimensions over
    which ranks add their sums. Returns None if x and weight are not both split along K."""
    if not (_sharded(x) and _sharded(weight) and x.device_mesh == weight.device_mesh):
        return None
    if type(weight.to_local()) is not QuantizedWeight:
        return None
    found: list[Any] = []
    for of_x, of_w in zip(x.placements, weight.placements, strict=True):
        last = isinstance(of_x, Shard) and of_x.dim % x.dim() == x.dim() - 1
        if of_w == Shard(1) and last:
            found.append(None)
        elif of_w != Replicate() or last or isinstance(of_x, Partial):
            return None
        else:
            found.append(of_x)
    if _sharded(bias) and any(placement != Replicate() for placement in bias.placements):
        return None
    return found if None in found else None


def _gradients(placed: Placements) -> list[Any]:
    """Returns the placements of the gradient of the bias, which each rank computes from its rows of
    x."""
    return [Partial() if isinstance(placement, Shard) else Replicate() for placement in placed]


class _Summed:
    """The dimensions of a mesh over which ranks add their sums."""

    def __init__(self, mesh: Any, dims: Sequence[bool]) -> None:
        self.mesh, self.dims = mesh, dims

    def reduced(self, local: Tensor, by: str) -> Tensor:
        """Returns the sum or the maximum (`by`) of the values of the ranks."""
        parts = [Partial(by) if summed else Replicate() for summed in self.dims]
        whole = DTensor.from_local(local, self.mesh, parts, run_check=False)
        found = whole.redistribute(placements=[Replicate()] * len(parts)).to_local()
        return found.wait() if hasattr(found, "wait") else found  # of functional collectives


def _product(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    summed: _Summed,
    reduce_dtype: torch.dtype | None,
) -> Tensor:
    out_dtype, frozen, how = output_dtype(x), weight.frozen, weight.how
    x = shifted(x, frozen.shift)
    if frozen.factor is not None or how.scheme.rotation:  # in float32, like the fused operator
        x = ops.rotate(x.float(), frozen.factor, how.scheme.rotation)
    with torch.no_grad():
        y = _summed_product(x.detach(), weight, bias, summed, (out_dtype, reduce_dtype))
    trains = torch.is_grad_enabled() and (x.requires_grad or getattr(bias, "requires_grad", False))
    return carried(y, x, bias, frozen.packed, how) if trains else y


def _summed_product(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    summed: _Summed,
    dtypes: tuple[torch.dtype, torch.dtype | None],
) -> Tensor:
    """Multiplies x, already transformed along K, by this rank's columns of the weight, and returns
    y with the sums of all ranks added."""
    (out_dtype, sent), frozen, how = dtypes, weight.frozen, weight.how
    scheme, exact = how.scheme, how.form.gemm and sent is None
    n = how.given["layout"][0]
    values = {**how.given, "x": x, "n": n, "weight": frozen.packed, "bias": bias}
    values["out_dtype"] = out_dtype
    lowered = lower(scheme, Circumstance(turned=False, canonical=True))
    if scheme.x is not None:
        values["code_of_turned"] = code_of(scheme.x)
        *given, agreed = _scales(x, weight, summed)
        values["static_scale"], values["static_zero_point"] = given
        exact = exact and agreed
    values, steps = run(lowered.shared, values), lowered.own
    if exact:
        first, *rest = steps
        values = run([first], values)
        values["acc"] = summed.reduced(values["acc"], "sum")
        return run(rest, values)["y"]  # type: ignore[no-any-return]
    values |= {"bias": None, "out_dtype": torch.float32}
    y = summed.reduced(run(steps, values)["y"].to(sent or torch.float32), "sum").float()
    return (y if bias is None else y + bias.float()).to(out_dtype)


def _scales(
    x: Tensor, weight: QuantizedWeight, summed: _Summed
) -> tuple[Tensor | None, Tensor | None, bool]:
    """Returns scales and zero points for the rows of x, of which this rank has some columns, and
    whether all ranks have the scales of the whole weight. The scales are None if groups of K have
    their own."""
    frozen, how = weight.frozen, weight.how
    own = not (has_values(frozen.packed) and weight.memory.has_scales_of_whole)
    mark = x.new_full((*x.shape[:-1], 1), float(own), dtype=torch.float32)
    if how.scheme.calibrated or how.form.x_groups:
        agreed = how.form.gemm and _all_zero(summed.reduced(mark.flatten()[:1], "max"))
        return frozen.x_scale, frozen.x_zero_point, agreed
    low, high = x.amin(-1, keepdim=True).float(), x.amax(-1, keepdim=True).float()
    ends = torch.cat([-low, high], -1).nan_to_num(torch.inf, torch.inf, -torch.inf)
    low, high, mark = summed.reduced(torch.cat([ends, mark], -1), "max").split(1, -1)
    code = Code(*code_of(how.scheme.x))  # type: ignore[arg-type]
    _, scale, zero_point = ops.quantize(torch.cat([-low, high], -1), list(code))
    return scale, zero_point, _all_zero(mark)


def _all_zero(mark: Tensor) -> bool:
    """Whether all marks are 0; False if the values are not known."""
    return has_values(mark) and not bool(mark.any())
