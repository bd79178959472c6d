"""LSQLinear: a linear whose quantization steps are parameters, for quantization-aware training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qfx.nn.dtypes import drawn_linear
from qfx.nn.hook_transfer import sizes
from qfx.nn.learned_steps import LearnedSteps
from qfx.values.scheme import Scheme


class LSQLinear(LearnedSteps):
    """y = x^ [..., K] @ w^ [N, K].T + bias in int8, with learned steps. (Q6) (T2)

    y has the dtype of x, or that of autocast if it is on, like the output of nn.Linear. Parameters:
    `weight` and `bias` in float; `w_log_step`, the logarithm of the weight's step, [N, 1] or [1, 1]
    depending on `scheme.w`; `x_log_step` [1], if `scheme.x` is per tensor (for per row, the scales
    of activations are dynamic); `shift` [K], which is added to x before quantization, if requested.
    The logarithm keeps a step positive and makes the learning rate a relative change. Until
    `observe` is called, `x_log_step` and therefore the output is NaN.

        linear = qfx.nn.LSQLinear.from_float(torch.nn.Linear(64, 32))

    Casting the module leaves the steps in float32. In eval mode the weight is packed once, and
    again when it or its step changes; a compiled graph packs it at each call. The state_dict also
    contains a tensor `scheme`. Loading steps of another scheme raises an error. Raises ValueError
    for a scheme with rotation, groups, per-column or static scales, or float activations.
    """

    kind = "LSQLinear"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        scheme: Scheme | None = None,
        shift: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        made = drawn_linear(in_features, out_features, bias, device, dtype)
        self._take(made, scheme or Scheme(), shift)

    @classmethod
    def from_float(
        cls, linear: nn.Linear, scheme: Scheme | None = None, shift: bool = False
    ) -> LSQLinear:
        """Returns an LSQLinear that uses the same parameters as `linear`, with a step that is
        fitted to the weight."""
        sizes(linear, "LSQLinear")
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._take(linear, scheme or Scheme(), shift)
        module.train(linear.training)
        return module

    def observe(self, x: Tensor) -> None:
        """Fits the step of activations to x [..., K] by the least mean square error."""
        self._fit(x)

    def forward(self, input: Tensor) -> Tensor:  # the name of the argument of nn.Linear
        """Maps x [..., K] to [..., N]."""
        return self._product([input], self.bias)

    def extra_repr(self) -> str:
        shift = ", shift=True" if self.shift is not None else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, scheme={self.scheme}{shift}"
        )
