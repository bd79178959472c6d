"""Quantized weights in two processes: FSDP2 runs int8 on codes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import qfx
from qfx.nn.quantized_weight import QuantizedWeight
from tests.nn.processes import in_processes

X = torch.randn(16, 128, generator=torch.Generator().manual_seed(3))
SCHEMES = ("w8a8", "w4a8", "w8a8-groups")


def _model(scheme: str, width: int = 256) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(128, width), nn.GELU(), nn.Linear(width, 128)).eval()
    return qfx.quantize_(net, qfx.Config(scheme=scheme))


def _y(model: Any) -> Tensor:
    with torch.no_grad():
        return model(X)  # type: ignore[no-any-return]


def _fsdp(scheme: str, mesh: Any) -> None:
    model = _model(scheme)
    expected = _y(copy.deepcopy(model))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    own = model[0].weight
    assert isinstance(own, DTensor) and type(own.to_local()) is QuantizedWeight
    assert own.to_local().nbytes < 0.6 * _model(scheme)[0].weight.nbytes
    for _ in range(2):  # the second time into the memory of the first
        assert torch.equal(_y(model), expected)
    model(X).square().sum().backward()  # the biases


def _loaded(mesh: Any) -> None:
    """Floats into the shards, which stay codes; codes are for whole weights."""
    model, other = _model("w8a8"), _model("w8a8")
    with torch.no_grad():
        other[0].weight.mul_(2)
    floats = {name: getattr(p, "dequantize", p.detach)() for name, p in other.named_parameters()}
    expected = _y(other)
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    set_model_state_dict(model, floats, options=StateDictOptions(full_state_dict=True))
    assert type(model[0].weight.to_local()) is QuantizedWeight
    assert float(qfx.sqnr(expected, _y(model))) > 25
    with pytest.raises(RuntimeError, match="load before the model is sharded"):
        model.load_state_dict(other.state_dict())


def _uneven(mesh: Any) -> None:
    model = _model("w8a8", width=255)
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match="255 rows of a quantized weight are no multiple of 2"):
        _y(model)


def _distributed(scheme: str, mesh: Any) -> None:
    weight = _model(scheme)[0].weight
    for dim in (0, 1):
        for source in (0, None):
            local: Any = distribute_tensor(weight, mesh, [Shard(dim)], src_data_rank=source)
            part = weight.dequantize().chunk(2, dim)[dist.get_rank()]
            assert type(local.to_local()) is QuantizedWeight
            assert torch.equal(local.to_local().dequantize(), part)


def _run(mesh: Any) -> None:
    for scheme in SCHEMES:
        _distributed(scheme, mesh)
        _fsdp(scheme, mesh)
    _loaded(mesh)
    _uneven(mesh)


def test_two_processes_run_int8_on_their_parts() -> None:
    in_processes(_run)
