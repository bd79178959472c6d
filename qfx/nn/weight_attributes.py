"""Attributes of a quantized weight that PyTorch keeps in C++, and how such a weight is sent to
other processes."""

from __future__ import annotations

import warnings
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from qfx.host.subclasses import SET_DATA, as_parameter
from qfx.nn.float_weight import check_written
from qfx.nn.frozen import Frozen
from qfx.nn.quantized_weight import PYTHON, QuantizedWeight
from qfx.values.scheme import Scheme

_SET_REQUIRES_GRAD: Any = Tensor.requires_grad.__set__  # type: ignore[attr-defined]


@torch.no_grad()
def _set_data(weight: QuantizedWeight, value: Any) -> None:
    """Implements `weight.data = value`. `weight.data += d` also ends here: `value` is then an alias
    of the weight, and the sum was already written through the alias."""
    if isinstance(value, QuantizedWeight):
        if not weight.become(value):
            raise ValueError(f"{weight!r} cannot have the data of {value!r}: assign a Parameter")
        return
    n, k = weight.shape
    if isinstance(value, Tensor) and value.dim() == 1:
        raise ValueError(
            f"{weight!r} cannot be flattened, as FullyShardedDataParallel does: shard the model by "
            "torch.distributed.fsdp.fully_shard"
        )
    check_written(value, n, k, value)
    if (value.dtype, value.device) != (weight.dtype, weight.device):
        weight.become(weight.to(value.device, value.dtype))
    weight.write(value)


def _require_grad(weight: QuantizedWeight, requires_grad: bool = True) -> QuantizedWeight:
    if requires_grad:
        warnings.warn(
            "qfx: requires_grad of a quantized weight, which is codes and does not train. What is "
            "to be trained is left float: qfx.Config(skip=[...])",
            stacklevel=4,
        )
    return weight


def _no_memory(weight: QuantizedWeight, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(f"{weight!r} has no floats in memory: weight.dequantize() makes them")


def _no_storage(weight: QuantizedWeight) -> Any:
    raise RuntimeError(
        f"{weight!r} has no floats in memory, and is saved as codes, which are in "
        "model.state_dict(), and not by the name of the parameter"
    )


PYTHON |= {
    SET_DATA: _set_data,
    _SET_REQUIRES_GRAD: lambda weight, value: (_require_grad(weight, value), None)[1],
    Tensor.requires_grad_: _require_grad,
    Tensor.element_size: lambda weight: max(1, round(weight.nbytes / max(weight.numel(), 1))),
    Tensor.numpy: _no_memory,
    Tensor.storage: _no_storage,  # safetensors calls it
    # Libraries use it to detect shared parameters. C++ code that reads floats there is refused.
    Tensor.data_ptr: lambda weight: weight.packed.data_ptr(),
}


def _sent(weight: QuantizedWeight) -> tuple[Any, ...]:
    """Pickles a weight for multiprocessing, so that processes share the memory of its tensors."""
    given = tuple(weight.frozen), weight.scheme, tuple(weight.shape), weight.dtype
    return _received, (*given, weight._is_parameter)


def _received(
    frozen: Any, scheme: Scheme, shape: Any, dtype: torch.dtype, parameter: bool
) -> Tensor:
    made = QuantizedWeight.holding(Frozen(*frozen), scheme, shape, dtype)
    return as_parameter(made) if parameter else made


ForkingPickler.register(QuantizedWeight, _sent)
