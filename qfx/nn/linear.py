"""Linear: an nn.Linear whose weight is int8, for a model that is saved, loaded and served."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from qfx.host.autograd import transforming
from qfx.host.subclasses import as_parameter
from qfx.nn.bias_warning import watch
from qfx.nn.dtypes import drawn_linear
from qfx.nn.frozen import linear
from qfx.nn.frozen_state import FrozenState
from qfx.nn.hook_transfer import sizes
from qfx.nn.linear_weight import LinearWeight, as_leaf, named_scheme
from qfx.nn.quantized_weight import QuantizedWeight
from qfx.nn.weight_parts import weight_of
from qfx.values.scheme import Scheme
from qfx.values.site_recipe import SiteRecipe


class Linear(LinearWeight, nn.Linear):
    """y = x [..., K] @ w^ [N, K].T + bias, where w^ is given by int8 codes and does not train.

    An nn.Linear whose parameter `weight` is a `QuantizedWeight`: a tensor of floats for code that
    reads or writes it, a packed weight in memory. With another weight (a float Parameter that is
    assigned, or one that a parametrization computes) it computes like nn.Linear.

        linear = qfx.nn.Linear.from_float(torch.nn.Linear(256, 128), "w4a8")

    y has the dtype of x, or that of autocast if it is on, like the output of nn.Linear. x and the
    bias get gradients (T1). Casting the module casts the bias and the dtype that `weight` reports.

    The state_dict contains `codes` int8 [N, K], `scale` float32 [N] (or [N, G] for G groups),
    `bias`, `scheme` int32 [32] (`qfx/nn/scheme_tensor.py`), and, if the scheme needs them,
    `zero_point` int32 [N, G], `factor` float32 [K], `x_scale` float32 [1], `x_zero_point` int32 [1]
    and a learned `shift` float32 [K] that is added to x first. For a packed weight the codes are
    uint8, a stream of bits for each row, the scales are bfloat16 or float16, and there are int8
    zero points or a `minimum` (`qfx/nn/serialized_weight.py`). A write to one of these tensors in
    place changes the weight.

    Loading takes the scheme together with the codes, whatever scheme the module had, or a float
    `weight`, which is quantized with the module's scheme. The state is checked first. If its parts
    do not fit each other, an error is raised and the module is not changed.

    `reduce_dtype`, of a module or of the class: the dtype of the sums that ranks send each other if
    each has some columns of the weight. None: int32, which is exact, or float32 for weights with
    groups.
    """

    reduce_dtype: torch.dtype | None = None
    is_parted = False  # whether the weight is split across ranks, which pass parts of x

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        scheme: Scheme | SiteRecipe | str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Initialises the weight like nn.Linear; mostly used before a state_dict is loaded.
        `scheme`: also the name of a preset. `dtype`: the dtype of the bias and the one that
        `weight` reports, float32 by default."""
        nn.Module.__init__(self)
        if isinstance(scheme, SiteRecipe):
            scheme = replace(scheme, rounding=None)  # the codes of the recipe are of another weight
        drawn = drawn_linear(in_features, out_features, bias, device, dtype)
        self._take(drawn, QuantizedWeight.of(drawn.weight, named_scheme(scheme)))

    @classmethod
    def from_float(
        cls, linear: nn.Linear, scheme: Scheme | SiteRecipe | str | None = None
    ) -> Linear:
        """Quantizes the weight of `linear` and uses the same bias parameter.

        `scheme`: `qfx.Scheme()` by default, or the name of a preset, or a `SiteRecipe`, which
        provides static scales, a factor and codes. Raises ValueError for a scheme that needs a
        recipe, and for a recipe for another shape or weight.
        """
        sizes(linear, "Linear")
        return cls._of(linear, QuantizedWeight.of(linear.weight, named_scheme(scheme)))

    @classmethod
    def from_state(cls, linear: nn.Module, found: FrozenState) -> Linear:
        """Implements `StoredModule.from_state`."""
        k, n = sizes(linear, "Linear")
        tensors = {name: tensor.detach() for name, tensor in found.tensors.items()}
        dtype = linear.weight.dtype
        assert isinstance(dtype, torch.dtype)
        return cls._of(linear, weight_of(found._replace(tensors=tensors), n, k, dtype))

    @classmethod
    def _of(cls, linear: nn.Module, weight: QuantizedWeight) -> Linear:
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._take(linear, weight)
        module.train(linear.training)
        return module

    def _take(self, linear: Any, weight: QuantizedWeight) -> None:
        self.in_features, self.out_features = sizes(linear, "Linear")
        self.weight = as_parameter(weight)
        self.register_parameter("bias", linear.bias)
        if getattr(linear, "floats_are_transposed", False):
            self.floats_are_transposed = True
        watch(self)

    def reset_parameters(self) -> None:
        """Draws a new weight, and a bias if there is one, like nn.Linear."""
        shape, device = (self.in_features, self.out_features), self.weight.device
        drawn = nn.Linear(*shape, dtype=torch.float32, device=device)
        if self.is_quantized:
            self.quantized.requantize(drawn.weight.detach())
        else:
            self.weight.data.copy_(drawn.weight.detach())
        if self.bias is not None:
            self.bias.data.copy_(drawn.bias.detach())

    def forward(self, input: Tensor) -> Tensor:  # the name of the argument of nn.Linear
        """Maps x [..., K] to [..., N]."""
        weight: Any = self._parameters.get("weight")
        if type(weight) is not QuantizedWeight or transforming():
            return self._of_any_weight(input)
        if isinstance(input, fx.Proxy) and _stays_whole(self, input.tracer):
            return as_leaf(self, input)
        if self.is_parted and torch.compiler.is_compiling():
            return F.linear(input, weight, self.bias)  # the weight is made within the graph
        return linear(input, self.bias, weight.frozen, weight.how)

    def _of_any_weight(self, x: Tensor) -> Tensor:
        if type(self.weight).__name__ == "DTensor":
            from qfx.nn.row_parallel import linear_of_parts  # imports distributed tensors

            return linear_of_parts(x, self.weight, self.bias, self.reduce_dtype)
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        weight = self._codes_here()
        scheme = "" if weight is None else f", scheme={weight.scheme}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}{scheme}"
        )


def _stays_whole(module: Linear, tracer: Any) -> bool:
    """Whether symbolic tracing keeps the module as one call, as it does for modules of torch.nn.
    `qfx.trace` traces into it, because it looks for int8 operators."""
    return not isinstance(module, getattr(tracer, "opened", ()))
