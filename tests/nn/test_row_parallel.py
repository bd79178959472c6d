"""Tensor parallelism in two processes: the bits of one where sums are integers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

import qfx
from qfx.nn.gathered_weight import gathered_linears
from qfx.nn.quantized_weight import QuantizedWeight
from tests.nn.processes import in_processes

X = torch.randn(16, 128, generator=torch.Generator().manual_seed(3))
M, N = 16, 128
EXACT = ("w8a8", "w8a8-symmetric", "w8a8-asymmetric", "w8a8-tensor", "w7a7")
FLOAT_SUMS = ("w8a8-groups", "w4a8", "w5a8", "w8", "w4")
# One more rounding a rank, of float32 sums of about 12 bits more than the result shows.
DB_OF_FLOAT_SUMS = 110
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def _model(scheme: str, width: int = 256, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(128, width), nn.GELU(), nn.Linear(width, N)).eval().to(dtype)
    return qfx.quantize_(net, qfx.Config(scheme=scheme))


def _y(model: Any, x: Tensor = X) -> Tensor:
    with torch.no_grad():
        return model(x)  # type: ignore[no-any-return]


def _parallel(model: Any, mesh: Any) -> Any:
    made = parallelize_module(copy.deepcopy(model), mesh, dict(PLAN))
    assert {type(made[i].weight.to_local()) for i in (0, 2)} == {QuantizedWeight}
    return made


def _bits(scheme: str, dtype: torch.dtype, mesh: Any) -> None:
    one = _model(scheme, dtype=dtype)
    both = _parallel(one, mesh)
    x = X.to(dtype, copy=True)
    if scheme in EXACT:
        assert torch.equal(_y(both, x), _y(one, x)), (scheme, dtype)
        x[0, 0], x[1, 5], x[2] = torch.nan, torch.inf, 0  # rows that one rank alone sees
        assert torch.equal(_y(both, x).nan_to_num(7), _y(one, x).nan_to_num(7))
        return
    y = _y(both, x)
    each = [torch.empty_like(y) for _ in range(2)]
    dist.all_gather(each, y)
    assert torch.equal(*each)
    if dtype == torch.float32:
        assert float(qfx.sqnr(_y(one), y)) > DB_OF_FLOAT_SUMS


def _gradients(scheme: str, mesh: Any) -> None:
    one = _model(scheme)
    found = []
    for model in (one, _parallel(one, mesh)):
        x = X.clone().requires_grad_()
        y = model(x)
        assert torch.equal(y.detach(), _y(model))
        model.zero_grad()
        y.square().sum().backward()
        found.append((x.grad, model[2].bias.grad))
    (dx, db), (dx_2, db_2) = found
    assert float(qfx.sqnr(dx, dx_2)) > DB_OF_FLOAT_SUMS
    assert float(qfx.sqnr(db, db_2.full_tensor())) > DB_OF_FLOAT_SUMS


class _Sent(TorchDispatchMode):
    """Counts the bytes of sums and maxima that a rank sends."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_reduce.default:
            self.bytes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def _sent(mesh: Any) -> None:
    """int32 sums are four bytes, bfloat16 two; of each row three floats come before."""
    one = _model("w8a8")
    both = _parallel(one, mesh)
    with _Sent() as exact:
        _y(both)
    assert exact.bytes == [M * 3 * 4, M * N * 4]
    both[2].reduce_dtype = torch.bfloat16
    with _Sent() as rounded:
        y = _y(both)
    assert rounded.bytes == [M * 3 * 4, M * N * 2]
    assert 40 < float(qfx.sqnr(_y(one), y)) < 70


def _gathered(scheme: str, mesh: Any) -> None:
    one = _model(scheme)
    both = _parallel(one, mesh)
    with gathered_linears(both):
        for name, value in one.state_dict().items():
            assert torch.equal(both.state_dict()[name], value), name
    assert type(both[0].weight) is not QuantizedWeight
    assert torch.equal(_y(both), _y(_parallel(one, mesh)))


WRITES: dict[str, Callable[[Any], object]] = {
    "mul_": lambda w: w.mul_(2),
    "add_": lambda w: w.add_(0.1 * torch.arange(w.shape[1])),
    "some rows": lambda w: w[:3].mul_(3),
}


def _written(scheme: str, mesh: Any) -> None:
    """Parts that are written get scales of their own, and are added as floats."""
    one = _model(scheme)
    both = _parallel(one, mesh)
    rank = dist.get_rank()
    for how, write in WRITES.items():
        local = both[2].weight.to_local()
        with torch.no_grad():
            write(local)
        y = _y(both)
        floats = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, N)).eval()
        with torch.no_grad():
            floats[0].weight.copy_(one[0].weight.dequantize())
            floats[0].bias.copy_(one[0].bias)
            floats[2].weight.copy_(both[2].weight.full_tensor())
            floats[2].bias.copy_(one[2].bias)
        each = [torch.empty_like(y) for _ in range(2)]
        dist.all_gather(each, y)
        assert torch.equal(*each), how
        assert float(qfx.sqnr(_y(floats), y)) > 25, (scheme, how)
        with gathered_linears(both):
            assert float(qfx.sqnr(floats[2].weight, both[2].weight.dequantize())) > 25, how
    made = _parallel(one, mesh)
    if rank == 0:
        with torch.no_grad():
            made[2].weight.to_local().mul_(2)
    y = _y(made)
    each = [torch.empty_like(y) for _ in range(2)]
    dist.all_gather(each, y)
    assert torch.equal(*each)


def _copies_have_the_scales_of_the_whole(mesh: Any) -> None:
    one = _model("w8a8")
    both = copy.deepcopy(_parallel(one, mesh))
    assert torch.equal(_y(both), _y(one))
    apart = _parallel(one, mesh)
    with torch.no_grad():  # parts that were quantized by themselves
        local = QuantizedWeight.of(apart[2].weight.to_local().dequantize(), one[2].scheme)
        parts = DTensor.from_local(local, mesh, [Shard(1)], run_check=False)
        apart[2].register_parameter("weight", nn.Parameter(parts, requires_grad=False))
    assert float(qfx.sqnr(_y(one), _y(apart))) > 25


def _autocast(mesh: Any) -> None:
    one = _model("w8a8")
    both = _parallel(one, mesh)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(_y(both), _y(one))


def _parted_blocks(mesh: Any) -> None:
    model = _model("w8a8", width=192)  # 96 columns each, in blocks of 64
    expected = _y(model)
    with pytest.warns(UserWarning, match="its 192 columns are parted at multiples of 96"):
        model = parallelize_module(model, mesh, dict(PLAN))
    assert type(model[2].weight.to_local()) is Tensor
    assert float(qfx.sqnr(expected, _y(model))) > 30


def _operators(mesh: Any) -> None:
    """Operators by themselves are cut along rows and heads, and gather what is not."""
    ops, x = torch.ops.qfx, X.reshape(2, 8, 128)
    weight = QuantizedWeight.of(torch.randn(64, 128), qfx.Scheme())
    packed = DTensor.from_local(weight.packed, mesh, [Replicate()])
    layout, code = weight.how.given["layout"], weight.how.given["code"]
    one_scale = [code[0], code[1], 1, *code[3:]]
    tail = (layout, None, "none", torch.float32)
    wanted = ops.linear_dynamic(x, weight.packed, layout, None, code, *tail[2:])
    for dim, cut in ((0, True), (1, True), (2, False)):
        parts = distribute_tensor(x, mesh, [Shard(dim)])
        found = [
            ops.linear_dynamic(parts, packed, layout, None, code, *tail[2:]),
            ops.linear(*ops.quantize(parts, code), packed, *tail),
        ]
        for y in found:
            assert y.placements == (Shard(dim) if cut else Replicate(),)
            assert torch.equal(y.full_tensor(), wanted)
        q, scale, _ = ops.quantize(parts, one_scale)
        assert q.placements == (Replicate(),) and len(scale.full_tensor().unique()) == 1
    q, k = torch.randn(1, 4, 16, 64), torch.randn(1, 2, 16, 64)
    given = (None, 0.125, True, torch.float32)
    wanted = ops.int8_attention(q, k, k, *given)
    for dim in (0, 1, 2):  # the one text, heads that share keys, tokens
        q_2, k_2 = (distribute_tensor(t, mesh, [Shard(dim)]) for t in (q, k))
        y = ops.int8_attention(q_2, k_2, k_2, *given)
        assert y.placements == (Shard(1) if dim == 1 else Replicate(),)
        assert torch.equal(y.full_tensor(), wanted)


def _run(mesh: Any) -> None:
    for scheme in (*EXACT, *FLOAT_SUMS):
        for dtype in (torch.float32, torch.bfloat16):
            _bits(scheme, dtype, mesh)
    for scheme in ("w8a8", "w8a8-asymmetric", "w4a8", "w4"):
        _gradients(scheme, mesh)
        _gathered(scheme, mesh)
    for scheme in ("w8a8", "w8a8-asymmetric", "w8a8-tensor", "w4a8"):
        _written(scheme, mesh)
    _copies_have_the_scales_of_the_whole(mesh)
    _autocast(mesh)
    _sent(mesh)
    _parted_blocks(mesh)
    _operators(mesh)


def test_two_processes_have_the_bits_of_one() -> None:
    in_processes(_run)
