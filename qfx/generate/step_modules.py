"""Replacements of int8 linears in the copy of a model that is captured.

Their packed weight is a buffer, which programs read; there is no float tensor for it. Linears that
read one input share one tensor of smoothing factors. With separate tensors, rewriting could not
detect that q, k and v quantize the same floats in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from qfx.host.tensors import has_values
from qfx.nn.frozen import Frozen, Prepared, float_weight, linear
from qfx.nn.linear import Linear


class ServedLinear(Linear):
    """An int8 linear with the tensors of its weight as buffers, and with the same bias."""

    how: Prepared

    @classmethod
    def of(cls, module: Linear) -> ServedLinear:
        """Returns a linear with the tensors and attributes of `module`."""
        served = cls.__new__(cls)
        vars(served).update(vars(module))
        vars(served)["_parameters"] = {
            name: t for name, t in module._parameters.items() if name != "weight"
        }
        vars(served)["_buffers"] = {**module._buffers, **_packed_tensors(module)}
        served.how = module.quantized.how
        return served

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight as floats, for a model that reads it."""
        shape = self.out_features, self.in_features
        return float_weight(self._frozen(), self.how.scheme, *shape)

    def forward(self, input: Tensor) -> Tensor:  # the name of the argument of nn.Linear
        """Maps x [..., K] to [..., N]."""
        return linear(input, self.bias, self._frozen(), self.how)

    def _frozen(self) -> Frozen:
        return Frozen(*[self._buffers.get(name) for name in Frozen._fields])  # type: ignore[arg-type]


def is_served(module: nn.Module) -> bool:
    """Whether the module is an int8 linear that a `ServedLinear` can replace."""
    return type(module) is Linear and module.is_quantized


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters and buffers of a model by all of their names; for int8 linears, the
    tensors of `ServedLinear` instead of the weight."""
    for at, module in model.named_modules(remove_duplicate=False):
        own: dict[str, Any] = {**module._parameters, **module._buffers}
        if is_served(module):
            own = {**own, **_packed_tensors(module)}  # type: ignore[arg-type]
            del own["weight"]
        for name, tensor in own.items():
            if tensor is not None:
                yield f"{at}.{name}" if at else name, tensor


def _packed_tensors(module: Linear) -> dict[str, Tensor]:
    return {name: t for name, t in module.quantized.frozen._asdict().items() if t is not None}


def equal_factors(model: nn.Module) -> dict[str, str]:
    """Returns, for each linear whose smoothing factor equals that of an earlier linear, the name of
    the earlier one.

    A program uses one tensor for all of them, so the result is part of the key of a program.
    """
    first: dict[tuple[str, bytes], str] = {}
    same: dict[str, str] = {}
    for name, module in model.named_modules():
        factor = module.factor if is_served(module) else None
        if factor is not None and has_values(factor):
            key = str(factor.device), factor.cpu().numpy().tobytes()
            if (other := first.setdefault(key, name)) != name:
                same[name] = other
    return same


def share_factors(twin: nn.Module, same: Mapping[str, str]) -> None:
    """Makes linears of `twin` with equal smoothing factors share one tensor. `same`: the result of
    `equal_factors`. `twin`: a copy of the model with its own dictionaries of buffers, so that the
    user's model is not changed."""
    for name, other in same.items():
        twin.get_submodule(name)._buffers["factor"] = twin.get_submodule(other)._buffers["factor"]
