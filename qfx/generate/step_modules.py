"""Modules in the place of int8 linears, of which a step is captured: their packed weight is a
buffer, which programs read, and no tensor stands for floats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from qfx.nn.frozen import Frozen, Prepared, float_weight, linear
from qfx.nn.linear import Linear


class ServedLinear(Linear):
    """An int8 linear with the tensors of its weight as buffers, and its very bias."""

    how: Prepared

    @classmethod
    def of(cls, module: Linear) -> ServedLinear:
        """It has the tensors of `module`, and is called as that is."""
        served = cls.__new__(cls)
        vars(served).update(vars(module))
        vars(served)["_parameters"] = {
            name: t for name, t in module._parameters.items() if name != "weight"
        }
        vars(served)["_buffers"] = {**module._buffers, **_held(module)}
        served.how = module.quantized.how
        return served

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The floats, for a model that looks at them."""
        shape = self.out_features, self.in_features
        return float_weight(self._frozen(), self.how.scheme, *shape)

    def forward(self, input: Tensor) -> Tensor:  # called as nn.Linear's may be
        """x [..., K] -> [..., N]."""
        return linear(input, self.bias, self._frozen(), self.how)

    def _frozen(self) -> Frozen:
        return Frozen(*[self._buffers.get(name) for name in Frozen._fields])  # type: ignore[arg-type]


def is_served(module: nn.Module) -> bool:
    """Whether a `ServedLinear` can take its place."""
    return type(module) is Linear and module.is_quantized


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Its parameters and buffers by every name, and in the place of the weights of int8 linears
    the tensors of `ServedLinear`."""
    for at, module in model.named_modules(remove_duplicate=False):
        own: dict[str, Any] = {**module._parameters, **module._buffers}
        if is_served(module):
            own = {**own, **_held(module)}  # type: ignore[arg-type]
            del own["weight"]
        for name, tensor in own.items():
            if tensor is not None:
                yield f"{at}.{name}" if at else name, tensor


def _held(module: Linear) -> dict[str, Tensor]:
    return {name: t for name, t in module.quantized.frozen._asdict().items() if t is not None}
